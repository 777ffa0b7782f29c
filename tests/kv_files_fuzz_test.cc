// SPDX-License-Identifier: Apache-2.0
// Manifests and branch heads with random damage, with and without a checksum that fits: the parsers return or throw
// BadFile, and what they return encodes to the same bytes.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <vector>

#include "fuzz/kv_files_fuzz.h"
#include "kv_mirror.h"
#include "model_files.h"

namespace treeattn {
namespace {

using namespace testing_kv;
using Bytes = std::vector<std::byte>;

Bytes some_manifest(Random& random) {
  parallel::Manifest manifest;
  manifest.generation = static_cast<std::uint64_t>(random.integer(0, 1'000'000'000));
  manifest.config = random_config(random);
  for (std::int64_t i = random.integer(0, 6); i > 0; --i) {
    manifest.next_sequence += random.integer(0, 2);
    manifest.sequences.push_back({manifest.next_sequence++, random.integer(0, 1000)});
  }
  return parallel::encode(manifest);
}

Bytes some_branch(Random& random) {
  parallel::BranchHeader header{
      static_cast<std::uint64_t>(random.integer(0, 1'000'000)), static_cast<int>(random.integer(0, 255)), {}};
  std::int32_t pages = 0;
  for (std::int64_t i = random.integer(0, 10); i > 0; --i) {
    header.chunks.push_back({random.integer(0, 5), random.integer(0, 100), random.integer(1, 64), pages++});
  }
  return parallel::encode(header);
}

// One change of the kinds that find mistakes in parsers.
void mutate(Random& random, Bytes& bytes) {
  const auto size = static_cast<std::int64_t>(bytes.size());
  const auto at = static_cast<std::size_t>(size == 0 ? 0 : random.integer(0, size - 1));
  switch (size == 0 ? 3 : random.integer(0, 5)) {
    case 0:
      bytes[at] ^= std::byte{1} << random.integer(0, 7);
      break;
    case 1: {  // a number at the edge
      const std::vector<std::uint64_t> edges = {0,
                                                1,
                                                0x7fffffff,
                                                0x80000000,
                                                ~std::uint64_t{0},
                                                std::uint64_t{1} << 63,
                                                (std::uint64_t{1} << 63) - 1,
                                                std::uint64_t{1} << 60};
      const std::uint64_t edge = random.pick(edges);
      std::memcpy(&bytes[at], &edge, std::min(sizeof edge, bytes.size() - at));
      break;
    }
    case 2:
      bytes.resize(at);
      break;
    case 3:
      for (std::int64_t i = random.integer(1, 40); i > 0; --i) {
        bytes.push_back(static_cast<std::byte>(random.integer(0, 255)));
      }
      break;
    case 4:
      bytes.erase(bytes.begin() + static_cast<std::ptrdiff_t>(at));
      break;
    default: {  // a piece twice
      const Bytes piece(bytes.begin() + static_cast<std::ptrdiff_t>(at), bytes.end());
      bytes.insert(bytes.end(), piece.begin(), piece.end());
    }
  }
}

TEST(KvFilesFuzz, ParsersReturnOrThrowBadFile) {
  Random random(test_seed());
  int accepted = 0, tried = 0;
  for (int round = 0; round < 40'000; ++round, ++tried) {
    Bytes bytes = round % 2 == 0 ? some_manifest(random) : some_branch(random);
    ASSERT_TRUE(fuzz::parse_anything(bytes));
    for (std::int64_t i = random.integer(1, 3); i > 0; --i) mutate(random, bytes);
    if (random.chance(0.8)) fuzz::repair_checksum(bytes);
    accepted += fuzz::parse_anything(bytes) ? 1 : 0;
  }
  for (int round = 0; round < 5'000; ++round, ++tried) {
    Bytes bytes(static_cast<std::size_t>(random.integer(0, 300)));
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random.integer(0, 255));
    EXPECT_FALSE(fuzz::parse_anything(bytes));
  }
  std::printf("%d inputs, %d of the damaged ones still made sense\n", tried, accepted);
}

// What libFuzzer starts from.
TEST(KvFilesFuzz, TheCorpusIsSound) {
  int files = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::filesystem::path(TREEATTN_TESTS_DIR) / "fuzz/corpus/kv_files")) {
    const std::string bytes = testing_model::read_file(entry.path());
    EXPECT_TRUE(fuzz::parse_anything(std::as_bytes(std::span(bytes)))) << entry.path();
    ++files;
  }
  EXPECT_GT(files, 0);
}

}  // namespace
}  // namespace treeattn
