// SPDX-License-Identifier: Apache-2.0
// Weights: safetensors files, sound and hostile, directories of shards, and random weights.
#include "model/safetensors.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <set>

#include "address_limit.h"
#include "base/half.h"
#include "model/checkpoint.h"
#include "model/safetensors_index.h"
#include "model/tensor_list.h"
#include "model_files.h"
#include "temporary_directory.h"
#include "treeattn/error.h"

namespace treeattn {
namespace {

using namespace model;
using namespace testing_model;
using Shape = std::vector<std::int64_t>;

SafetensorsHeader parse(const std::string& file) {
  return parse_safetensors(std::as_bytes(std::span(file)), "x.safetensors");
}
SafetensorsHeader parse(const Json& header, std::size_t data) {
  return parse(safetensors_file(header.dump(), std::string(data, 'd')));
}

TEST(Safetensors, ReadsEveryTypeWeUse) {
  Json header = {{"a", tensor_entry("F32", {2, 3}, 0, 24)},
                 {"b", tensor_entry("BF16", {5}, 24, 34)},
                 {"c", tensor_entry("F16", {1, 1, 1}, 34, 36)},
                 {"d", tensor_entry("F16", {0, 7}, 36, 36)},
                 {"scalar", tensor_entry("BF16", Json::array(), 36, 38)},
                 {"__metadata__", {{"format", "pt"}}}};
  std::string data;
  for (int i = 0; i < 38; ++i) data += static_cast<char>(i);
  TemporaryDirectory directory;
  write_file(directory.path() / "model.safetensors", safetensors_file(header.dump(), data));
  const auto checkpoint = open_checkpoint(directory.path());
  const auto check = [&](const char* name, const Shape& shape, DType dtype, int first) {
    const Tensor tensor = checkpoint->tensor(name, shape);
    EXPECT_EQ(tensor.dtype, dtype);
    EXPECT_EQ(tensor.shape, shape);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(tensor.data) % dtype_size(dtype), 0u);
    if (first >= 0) {
      EXPECT_EQ(*static_cast<const char*>(tensor.data), first);
    }
  };
  check("a", {2, 3}, DType::kFloat32, 0);
  check("b", {5}, DType::kBFloat16, 24);
  check("c", {1, 1, 1}, DType::kFloat16, 34);
  check("d", {0, 7}, DType::kFloat16, -1);
  check("scalar", {}, DType::kBFloat16, 36);
  expect_refused([&] { checkpoint->tensor("a", Shape{3, 2}); }, {"model.safetensors", "a", "[2, 3]", "[3, 2]"});
  expect_refused([&] { checkpoint->tensor("b", Shape{}); }, {"[5]"});
  expect_refused([&] { checkpoint->tensor("z", Shape{1}); }, {"model.safetensors", "no tensor z", "[1]"});
  expect_refused([&] { checkpoint->tensor("__metadata__", Shape{}); }, {"no tensor"});
}

TEST(Safetensors, UnknownTypesMatterOnlyWhenAskedFor) {
  TemporaryDirectory directory;
  Json header = {{"a", tensor_entry("F32", {1}, 0, 4)},
                 {"b", tensor_entry("I64", {1}, 8, 16)},
                 {"c", tensor_entry("F4_E2M1", {8}, 4, 8)}};
  write_file(directory.path() / "model.safetensors", safetensors_file(header.dump(), std::string(16, '\0')));
  const auto checkpoint = open_checkpoint(directory.path());
  checkpoint->tensor("a", Shape{1});
  expect_refused([&] { checkpoint->tensor("b", Shape{1}); }, {"b", "I64", "BF16, F16 or F32"});
  expect_refused([&] { checkpoint->tensor("c", Shape{8}); }, {"c", "F4_E2M1"});
}

TEST(Safetensors, RefusesBrokenFrames) {
  for (std::size_t size = 0; size < 8; ++size) expect_refused([&] { parse(std::string(size, '\0')); }, {"at least 8"});
  const std::string good = safetensors_file(Json{{"a", tensor_entry("F32", {2}, 0, 8)}}.dump(), "12345678");
  parse(good);
  for (std::size_t cut = 0; cut < good.size(); ++cut) {
    expect_refused([&] { parse(good.substr(0, cut)); }, {"x.safetensors"});
  }
  expect_refused([&] { parse(good + "x"); }, {"the end of the file"});
  for (const std::uint64_t length :
       {std::uint64_t{1} << 63, ~std::uint64_t{0}, std::uint64_t{100'000'001}, std::uint64_t{good.size() - 7}}) {
    std::string file = good;
    std::memcpy(file.data(), &length, sizeof length);
    expect_refused([&] { parse(file); }, {"a header of " + std::to_string(length)});
  }
  expect_refused([&] { parse("<!doctype html><title>404</title>"); }, {"is this a safetensors file"});
  // What a clone without Git LFS has in its place.
  expect_refused([&] { parse("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 8\n"); }, {"Git LFS"});
  expect_refused([&] { parse(safetensors_file("", "")); }, {"begin with {"});
  expect_refused([&] { parse(safetensors_file(" {}", "")); }, {"begin with {"});
  expect_refused([&] { parse(safetensors_file("[]", "")); }, {"begin with {"});
  expect_refused([&] { parse(safetensors_file("{\"a\":", "")); }, {"not JSON"});
  std::string deep = "{\"__metadata__\":";
  for (int i = 0; i < 100'000; ++i) deep += "{\"a\":";
  expect_refused([&] { parse(safetensors_file(deep, "")); }, {"deep"});
  EXPECT_TRUE(parse(safetensors_file("{}", "")).empty());
  EXPECT_TRUE(parse(safetensors_file("{\"__metadata__\":null}", "")).empty());
}

TEST(Safetensors, RefusesBrokenEntries) {
  const auto refused = [](const Json& header, std::size_t data, const std::vector<std::string>& says) {
    SCOPED_TRACE(header.dump());
    expect_refused([&] { parse(header, data); }, says);
  };
  const Json entry = tensor_entry("F32", {2}, 0, 8);
  const auto with = [&](const char* key, const Json& value) {
    Json changed = entry;
    changed[key] = value;
    return Json{{"a", changed}};
  };
  for (const char* key : {"dtype", "shape", "data_offsets"}) {
    Json missing = entry;
    missing.erase(key);
    refused({{"a", missing}}, 8, {std::string("a.") + key, "required"});
  }
  refused({{"a", 1}}, 8, {"a is 1", "an object"});
  refused({{"__metadata__", 1}}, 0, {"__metadata__", "an object"});
  refused(with("dtype", 1), 8, {"a.dtype"});
  refused(with("shape", "2"), 8, {"a.shape"});
  refused(with("shape", {-2}), 8, {"a.shape[0]", "-2"});
  refused(with("shape", {1, 1, 1, 1, 1, 1, 1, 1, 2}), 8, {"a.shape", "at most 8"});
  refused(with("shape", {3}), 8, {"data_offsets", "[3]"});
  refused(with("shape", {2.0}), 8, {"a.shape[0]"});
  // 2^62 * 4 wraps to nothing, 2^63 * 2 too, and a zero hides it.
  refused({{"a", tensor_entry("F32", {std::int64_t{1} << 62}, 0, 0)}}, 0, {"data_offsets"});
  refused({{"a", tensor_entry("F16", {std::int64_t{1} << 32, std::int64_t{1} << 31}, 0, 0)}}, 0, {"data_offsets"});
  refused({{"a", tensor_entry("F16", {std::int64_t{1} << 40, std::int64_t{1} << 40, 0}, 0, 0)}}, 0, {"data_offsets"});
  refused(with("data_offsets", {0, 16}), 8, {"data_offsets[1] is 16", "at most 8, where the file ends"});
  refused(with("data_offsets", {8, 0}), 8, {"data_offsets[1]"});
  refused(with("data_offsets", {-8, 0}), 8, {"data_offsets[0]"});
  refused(with("data_offsets", {0, std::uint64_t{1} << 63}), 8, {"data_offsets[1]"});
  refused(with("data_offsets", {0}), 8, {"data_offsets"});
  refused(with("data_offsets", {0, 8, 8}), 8, {"data_offsets"});
  refused(with("data_offsets", {0.0, 8.0}), 8, {"data_offsets[0]"});
}

TEST(Safetensors, RefusesHolesOverlapsAndBadPlaces) {
  const auto two = [](std::uint64_t a0, std::uint64_t a1, std::uint64_t b0, std::uint64_t b1) {
    return Json{{"a", tensor_entry("U8", {a1 - a0}, a0, a1)}, {"b", tensor_entry("U8", {b1 - b0}, b0, b1)}};
  };
  EXPECT_EQ(parse(two(4, 8, 0, 4), 8).size(), 2u);
  expect_refused([&] { parse(two(0, 4, 5, 8), 8); }, {"b", "where the tensor before it ends"});
  expect_refused([&] { parse(two(0, 5, 4, 8), 8); }, {"where the tensor before it ends"});
  expect_refused([&] { parse(two(0, 8, 0, 8), 8); }, {"where the tensor before it ends"});
  expect_refused([&] { parse(two(1, 4, 4, 8), 8); }, {"where the tensor before it ends"});
  expect_refused([&] { parse(two(0, 4, 4, 7), 8); }, {"the end of the file"});
  expect_refused([&] { parse(safetensors_file("{}", "x")); }, {"the end of the file"});
  expect_refused(
      [&] {
        parse(safetensors_file(R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},)"
                               R"("a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
                               ""));
      },
      {"\"a\"", "twice"});
  const Json crooked = {{"a", tensor_entry("U8", {1}, 0, 1)}, {"b", tensor_entry("F32", {1}, 1, 5)}};
  expect_refused([&] { parse(crooked, 5); }, {"b", "multiple of 4"});
  std::string header = Json{{"a", tensor_entry("BF16", {1}, 0, 2)}}.dump();
  while (header.size() % 8 != 1) header += ' ';
  const std::uint64_t length = header.size();
  std::string file(8, '\0');
  std::memcpy(file.data(), &length, sizeof length);
  expect_refused([&] { parse(file + header + "xx"); }, {"a", "multiple of 2"});
}

// ---- directories

std::string one_tensor(const std::string& name, char fill) {
  return safetensors_file(Json{{name, tensor_entry("F32", {1}, 0, 4)}}.dump(), std::string(4, fill));
}

void write_index(const std::filesystem::path& directory, const Json& weight_map) {
  const Json index = {{"metadata", {{"total_size", 8}}}, {"weight_map", weight_map}};
  write_file(directory / "model.safetensors.index.json", index.dump());
}

TEST(Checkpoint, Shards) {
  TemporaryDirectory directory;
  write_file(directory.path() / "one.safetensors", one_tensor("a", 'A'));
  write_file(directory.path() / "two.safetensors", one_tensor("b", 'B'));
  write_index(directory.path(), {{"a", "one.safetensors"}, {"b", "two.safetensors"}});
  const auto checkpoint = open_checkpoint(directory.path());
  EXPECT_EQ(*static_cast<const char*>(checkpoint->tensor("a", Shape{1}).data), 'A');
  EXPECT_EQ(*static_cast<const char*>(checkpoint->tensor("b", Shape{1}).data), 'B');
  expect_refused([&] { checkpoint->tensor("c", Shape{1}); }, {"index.json", "c", "[1]"});
  expect_refused([&] { checkpoint->tensor("b", Shape{2}); }, {"two.safetensors", "[1]", "[2]"});
}

TEST(Checkpoint, RefusesBrokenDirectories) {
  TemporaryDirectory directory, outside;
  expect_refused([&] { open_checkpoint(directory.path()); }, {"model.safetensors.index.json"});
  expect_refused([&] { open_checkpoint(directory.path() / "absent"); }, {"absent"});
  write_file(directory.path() / "one.safetensors", one_tensor("a", 'A'));
  write_file(outside.path() / "out.safetensors", one_tensor("a", 'A'));
  const auto refused = [&](const Json& map, const std::vector<std::string>& says) {
    SCOPED_TRACE(map.dump());
    write_index(directory.path(), map);
    expect_refused([&] { open_checkpoint(directory.path()); }, says);
  };
  refused({{"b", "one.safetensors"}}, {"b", "one.safetensors", "does not have it"});
  refused({{"a", "absent.safetensors"}}, {"absent.safetensors", "No such file"});
  refused({{"a", (outside.path() / "out.safetensors").string()}}, {"weight_map.a", "in the directory"});
  refused({{"a", "../" + outside.path().filename().string() + "/out.safetensors"}}, {"in the directory"});
  refused({{"a", ".."}}, {"in the directory"});
  refused({{"a", ""}}, {"in the directory"});
  refused({{"a", "x/y"}}, {"in the directory"});
  refused({{"a", std::string("one.safetensors\0x", 17)}}, {"in the directory"});
  refused({{"a", "a\x1b[2Jb"}}, {"u001b[2Jb", "in the directory"});  // would clear a terminal
  refused({{"a", 1}}, {"a string"});
  refused(Json::object(), {"at least one"});
  refused(Json::array(), {"an object"});
  Json many = Json::object();
  for (int i = 0; i < 5000; ++i) many["t" + std::to_string(i)] = "f" + std::to_string(i);
  refused(many, {"too many files"});
  write_file(directory.path() / "model.safetensors.index.json", "{}");
  expect_refused([&] { open_checkpoint(directory.path()); }, {"weight_map", "required"});
  write_file(directory.path() / "model.safetensors.index.json", "{\"weight_map\": {\"a\": \"b\", \"a\": \"c\"}}");
  expect_refused([&] { open_checkpoint(directory.path()); }, {"twice"});
  write_file(directory.path() / "model.safetensors", "");
  expect_refused([&] { open_checkpoint(directory.path()); }, {"model.safetensors", "0 bytes"});
}

// ---- random weights

LlamaConfig small_config(bool tied) {
  LlamaConfig config = known_shape("llama-3.2-1b");
  config.vocab = 1003;
  config.hidden = 96;
  config.layers = 2;
  config.heads = 6;
  config.kv_heads = 2;
  config.head_dim = 18;
  config.feed_forward = 131;
  config.tied_embeddings = tied;
  return config;
}

TEST(RandomCheckpoint, EveryTensorIsThereOnceWithTheRightSpread) {
  for (const bool tied : {false, true}) {
    const LlamaConfig config = small_config(tied);
    const auto checkpoint = random_checkpoint(config, 7), again = random_checkpoint(config, 7);
    const auto other = random_checkpoint(config, 8);
    std::set<std::pair<const std::byte*, const std::byte*>> places;
    double sum = 0, squares = 0, count = 0;
    bool differs = false;
    for (const NamedShape& tensor : tensor_list(config)) {
      const Tensor one = checkpoint->tensor(tensor.name, tensor.shape);
      const auto elements = static_cast<std::size_t>(tensor.elements());
      ASSERT_EQ(one.dtype, DType::kBFloat16);
      const auto* begin = static_cast<const std::byte*>(one.data);
      places.emplace(begin, begin + 2 * elements);
      EXPECT_EQ(std::memcmp(one.data, again->tensor(tensor.name, tensor.shape).data, 2 * elements), 0);
      differs = differs || std::memcmp(one.data, other->tensor(tensor.name, tensor.shape).data, 2 * elements) != 0;
      for (std::size_t i = 0; i < elements; ++i) {
        const double value = base::load_as_float(begin + 2 * i, DType::kBFloat16);
        if (tensor.shape.size() == 1) {
          ASSERT_EQ(value, 1.0);
          continue;
        }
        sum += value;
        squares += value * value;
        ++count;
      }
    }
    EXPECT_TRUE(differs);
    // Both within five standard errors (bfloat16 adds 2^-9 of each value, which is less).
    EXPECT_NEAR(sum / count, 0, 5 * 0.02 / std::sqrt(count));
    EXPECT_NEAR(std::sqrt(squares / count), 0.02, 5 * 0.02 / std::sqrt(2 * count) + 0.02 / 512);
    const std::byte* last = nullptr;
    for (const auto& [begin, end] : places) {
      EXPECT_GE(begin, last);
      last = end;
    }
    EXPECT_EQ(places.size(), tensor_list(config).size());
    const Shape embedding{config.vocab, config.hidden};
    if (tied) expect_refused([&] { checkpoint->tensor("lm_head.weight", embedding); }, {"lm_head.weight"});
    expect_refused([&] { checkpoint->tensor("model.norm.weight", Shape{1}); }, {"model.norm.weight", "[96]", "[1]"});
  }
}

TEST(RandomCheckpoint, WhatIsReleasedComesAgainAsItWas) {
  LlamaConfig config = small_config(false);
  config.vocab = 40000;  // more than a page of memory
  const auto checkpoint = random_checkpoint(config, 7), released = random_checkpoint(config, 7);
  for (const int round : {0, 1}) {
    for (const NamedShape& tensor : tensor_list(config)) {
      const auto bytes = 2 * static_cast<std::size_t>(tensor.elements());
      const Tensor want = checkpoint->tensor(tensor.name, tensor.shape),
                   got = released->tensor(tensor.name, tensor.shape);
      EXPECT_EQ(std::memcmp(got.data, want.data, bytes), 0) << tensor.name << round;
      if (tensor.shape.size() == 2) released->release(tensor.name);
    }
  }
}

// The file may be sound: it is this process that has too few addresses.
TEST(SafetensorsFile, TooFewAddressesAreNoFaultOfTheFile) {
  const TemporaryDirectory directory;
  const std::filesystem::path path = directory.path() / "model.safetensors";
  std::ofstream(path).put('x');
  std::filesystem::resize_file(path, std::uintmax_t{1} << 30);
  const testing_base::AddressLimit limit(std::size_t{256} << 20);
  EXPECT_THROW(SafetensorsFile file(path), Unavailable);
}

}  // namespace
}  // namespace treeattn
