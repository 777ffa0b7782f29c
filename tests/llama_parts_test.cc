// SPDX-License-Identifier: Apache-2.0
// What a Llama is made of: weights, frequencies, the memory it needs, its public face, and what a session keeps.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <memory>
#include <numbers>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "byte_tokenizer.h"
#include "model/loaded_model.h"
#include "model/memory_need.h"
#include "model/rope.h"
#include "model/session_file.h"
#include "model/stop_scanner.h"
#include "model_files.h"
#include "needs_pcre2.h"
#include "small_llama.h"
#include "temporary_directory.h"
#include "treeattn/error.h"
#include "treeattn/llama.h"

namespace treeattn::model {
namespace {

using testing_model::random_tokens;
using testing_model::small_config;
using testing_model::SmallModel;

TEST(Weights, StayWhereTheCheckpointHasThem) {
  LlamaConfig config = small_config();
  config.tied_embeddings = true;
  const auto checkpoint = std::make_shared<testing_model::RandomCheckpoint>(1, DType::kBFloat16);
  ThreadPool pool(2);
  const auto ops = kernels::cpu_model_ops(pool);
  std::vector<std::size_t> steps;
  std::size_t of_all = 0;
  WeightOptions options;
  options.progress = [&](std::size_t done, std::size_t total) {
    steps.push_back(done);
    of_all = total;
  };
  const Weights weights(config, checkpoint, *ops, pool, options);
  const std::int64_t shape[] = {config.feed_forward, config.hidden};
  EXPECT_EQ(weights.layers()[1].up.data, checkpoint->tensor("model.layers.1.mlp.up_proj.weight", shape).data);
  EXPECT_EQ(weights.head().data, weights.embedding().data);
  EXPECT_TRUE(std::is_sorted(steps.begin(), steps.end()));
  EXPECT_EQ(steps.back(), of_all);
  EXPECT_EQ(weights.bytes_per_token(), weight_bytes_per_token(config, WeightFormat::kAsStored));

  options.format = WeightFormat::kBFloat16;  // what they are already
  const Weights same(config, checkpoint, *ops, pool, options);
  EXPECT_EQ(same.layers()[1].up.data, weights.layers()[1].up.data);
  EXPECT_TRUE(stays_as_stored(options.format, DType::kBFloat16));
  EXPECT_FALSE(stays_as_stored(options.format, DType::kFloat32));
  EXPECT_FALSE(stays_as_stored(WeightFormat::kInt8, DType::kBFloat16));

  // A backend of its own memory gets copies with the same content.
  options.host_memory = false;
  const Weights copied(config, checkpoint, *ops, pool, options);
  const auto& a = weights.layers()[1].down;
  const auto& b = copied.layers()[1].down;
  EXPECT_NE(a.data, b.data);
  EXPECT_EQ(std::memcmp(a.data, b.data, matrix_bytes(a)), 0);
}

TEST(Weights, Int8IsCloseAndHalfTheSize) {
  LlamaConfig config = small_config();
  const SmallModel as_stored(config), int8(config, DType::kBFloat16, WeightFormat::kInt8);
  EXPECT_EQ(int8.weights->bytes_per_token(), weight_bytes_per_token(config, WeightFormat::kInt8));
  EXPECT_LT(int8.weights->bytes_per_token() * 100, as_stored.weights->bytes_per_token() * 57);
  const kernels::WeightMatrix& w = as_stored.weights->layers()[0].q;
  const kernels::WeightMatrix& q = int8.weights->layers()[0].q;
  for (std::int64_t r = 0; r < w.rows; ++r) {
    for (std::int64_t c = 0; c < w.cols; ++c) {
      const std::int64_t i = r * w.cols + c;
      const float scale = q.scales[r * (w.cols / q.group) + c / q.group];
      const float was = base::load_as_float(static_cast<const std::uint16_t*>(w.data) + i, w.dtype);
      EXPECT_LE(std::fabs(static_cast<float>(static_cast<const std::int8_t*>(q.data)[i]) * scale - was),
                0.5001f * scale);
    }
  }
  config.feed_forward = 40;  // no whole groups
  EXPECT_THROW(SmallModel(config, DType::kBFloat16, WeightFormat::kInt8), InvalidArgument);
}

// Random weights are made when they are asked for and go when they have been quantised; a table that is read as it is
// stays, though the head is made of it as well.
TEST(Weights, WhatIsReadInPlaceIsNotReleased) {
  LlamaConfig config = small_config();
  config.tied_embeddings = true;
  config.vocab = 40000;  // more than a page of memory
  ThreadPool pool(1);
  const auto ops = kernels::cpu_model_ops(pool);
  const std::int64_t shape[] = {config.vocab, config.hidden};
  const auto fresh = random_checkpoint(config, 7);
  const void* table = fresh->tensor("model.embed_tokens.weight", shape).data;
  for (const bool host_memory : {true, false}) {
    WeightOptions options;
    options.format = WeightFormat::kInt8;
    options.host_memory = host_memory;
    const Weights weights(config, random_checkpoint(config, 7), *ops, pool, options);
    EXPECT_EQ(std::memcmp(weights.embedding().data, table, matrix_bytes(weights.embedding())), 0);
    EXPECT_EQ(weights.head().dtype, DType::kInt8);
  }
}

TEST(Weights, OtherTypesAreRoundedToBFloat16) {
  LlamaConfig config = small_config();
  config.tied_embeddings = true;
  for (const DType stored : {DType::kFloat32, DType::kFloat16}) {
    const SmallModel as_stored(config, stored), rounded(config, stored, WeightFormat::kBFloat16);
    EXPECT_EQ(rounded.weights->bytes_per_token(), weight_bytes_per_token(config, WeightFormat::kBFloat16));
    EXPECT_EQ(rounded.weights->head().data, rounded.weights->embedding().data);
    const kernels::WeightMatrix& from = as_stored.weights->layers()[1].down;
    const kernels::WeightMatrix& to = rounded.weights->layers()[1].down;
    ASSERT_EQ(to.dtype, DType::kBFloat16);
    for (std::int64_t i = 0; i < from.rows * from.cols; ++i) {
      const auto* element = static_cast<const std::byte*>(from.data) + i * static_cast<int>(dtype_size(stored));
      EXPECT_EQ(static_cast<const std::uint16_t*>(to.data)[i],
                base::float_to_bfloat16(base::load_as_float(element, stored)));
    }
  }
}

TEST(Rope, LongWavesAreSlowedAndShortOnesKept) {
  LlamaConfig config = small_config();
  config.head_dim = 128;
  config.rope_theta = 500000;
  const std::vector<double> plain = rope_frequencies(config);
  ASSERT_EQ(plain.size(), 64u);
  EXPECT_EQ(plain[0], 1.0);
  EXPECT_NEAR(plain[32], std::pow(500000.0, -0.5), 1e-15);
  config.rope_scaling = RopeScaling{8.0, 1.0, 4.0, 8192};
  const std::vector<double> scaled = rope_frequencies(config);
  int kept = 0, slowed = 0, between = 0;
  for (std::size_t i = 0; i < plain.size(); ++i) {
    const double wave = 2 * std::numbers::pi / plain[i];
    if (wave < 8192 / 4.0) {
      EXPECT_EQ(scaled[i], plain[i]);
      ++kept;
    } else if (wave > 8192) {
      EXPECT_EQ(scaled[i], plain[i] / 8);
      ++slowed;
    } else {
      EXPECT_LT(scaled[i], plain[i]);
      EXPECT_GT(scaled[i], plain[i] / 8);
      ++between;
    }
    if (i > 0) {
      EXPECT_LT(scaled[i], scaled[i - 1]);
    }
  }
  EXPECT_GT(kept, 0);
  EXPECT_GT(slowed, 0);
  EXPECT_GT(between, 0);
}

TEST(MemoryNeed, MoreRanksNeedLessEach) {
  const LlamaConfig config = known_shape("llama-3.1-8b");
  const LlamaOptions options;
  constexpr std::int64_t kTokens = 128 * 1024;
  const auto need = [&](int ranks) { return memory_need(config, options, WeightFormat::kAsStored, kTokens, ranks); };
  // 8 heads of 128 in bfloat16, K and V, 32 layers.
  EXPECT_EQ(need(1).cache, std::size_t{kTokens} * 2 * 8 * 128 * 2 * 32);
  EXPECT_EQ(need(1).weights, static_cast<std::size_t>(config.parameters()) * 2);
  LlamaConfig wide = config;
  wide.stored = DType::kFloat32;
  EXPECT_EQ(memory_need(wide, options, WeightFormat::kAsStored, kTokens, 1).weights, need(1).weights * 2);
  EXPECT_EQ(memory_need(wide, options, WeightFormat::kBFloat16, kTokens, 1).weights, need(1).weights);
  for (const int ranks : {2, 4, 8}) EXPECT_EQ(need(ranks).cache, need(1).cache / static_cast<std::size_t>(ranks));
  EXPECT_GE(need(3).cache * 3, need(1).cache);

  const std::size_t machine = need(1).weights + need(1).of_rank() / 3;
  const int enough = ranks_needed(config, options, WeightFormat::kAsStored, kTokens, machine);
  ASSERT_GT(enough, 1);
  EXPECT_LE(need(enough).weights + need(enough).of_rank(), machine);
  EXPECT_GT(need(enough - 1).weights + need(enough - 1).of_rank(), machine);
  EXPECT_EQ(ranks_needed(config, options, WeightFormat::kAsStored, kTokens, need(1).weights / 2), 0);
}

TEST(MemoryNeed, WeightsThatAreMadeHereMustFit) {
  ModelDescription model = describe_random_model("llama-3.2-1b", 1);
  const std::size_t bytes = all_weight_bytes(model.config, WeightFormat::kAsStored);
  EXPECT_NO_THROW(require_room_for_weights(model, {}, bytes));
  try {
    require_room_for_weights(model, {}, bytes - 1);
    ADD_FAILURE() << "more than there is";
  } catch (const Unavailable& error) {
    EXPECT_STREQ(error.what(), "the weights take 2.5 GB of memory, and 2.5 GB can be had here");
  }
  EXPECT_THROW(require_room_for_weights(model, {}, 0), Unavailable);
  EXPECT_NO_THROW(require_room_for_weights(model, {}, std::nullopt));  // unknown
  EXPECT_NO_THROW(require_room_for_weights(model, {.gpu = 0}, bytes - 1));
  EXPECT_NO_THROW(require_room_for_weights(model, {.weights = WeightFormat::kInt8}, bytes - 1));
  model.directory = "of files";
  EXPECT_NO_THROW(require_room_for_weights(model, {}, 1));
  EXPECT_NO_THROW(require_room_for_weights(model, {.weights = WeightFormat::kBFloat16}, 1));
  EXPECT_THROW(require_room_for_weights(model, {.weights = WeightFormat::kInt8}, 1), Unavailable);
  model.config.stored = DType::kFloat32;
  EXPECT_THROW(require_room_for_weights(model, {.weights = WeightFormat::kBFloat16}, 1), Unavailable);
}

TEST(MemoryNeed, OfChunksWithoutNumber) {
  const LlamaConfig config = known_shape("llama-3.1-405b");
  LlamaOptions options;
  options.order.chunk_tokens = 64;
  options.order.branches = 65536;
  constexpr std::int64_t kTokens = std::int64_t{1} << 30;
  const auto need = [&](int ranks) { return memory_need(config, options, WeightFormat::kAsStored, kTokens, ranks); };
  // 8 heads of 128 in bfloat16, K and V, 126 layers.
  EXPECT_EQ(need(1).cache, std::size_t{kTokens} * 2 * 8 * 128 * 2 * 126);
  const std::size_t machine = need(1).weights + (std::size_t{32} << 30);
  const int enough = ranks_needed(config, options, WeightFormat::kAsStored, kTokens, machine);
  ASSERT_GT(enough, 1);
  EXPECT_LE(need(enough).weights + need(enough).of_rank(), machine);
  EXPECT_GT(need(enough - 1).weights + need(enough - 1).of_rank(), machine);
}

TEST(MemoryNeed, NoMoreRowsThanTokens) {
  const LlamaConfig config = known_shape("llama-3.1-8b");
  LlamaOptions options;
  const auto activations = [&](std::int64_t chunk_tokens) {
    options.order.chunk_tokens = chunk_tokens;
    return memory_need(config, options, WeightFormat::kAsStored, 100, 1).activations;
  };
  EXPECT_EQ(activations(1 << 20), activations(128));
}

TEST(PublicLlama, SaysHowItsFilesWantTokensChosen) {
  const auto golden = std::filesystem::path(TREEATTN_GOLDEN_DIR) / "llama" / "untied_scaled_f32";
  EXPECT_EQ(LlamaModel::load(golden)->generate_options().sampler, SamplerOptions{});
  TemporaryDirectory directory;
  std::filesystem::copy(golden, directory.path() / "model", std::filesystem::copy_options::recursive);
  testing_model::write_file(directory.path() / "model" / "generation_config.json",
                            R"({"do_sample": true, "temperature": 0.6, "top_k": 0, "max_new_tokens": 7})");
  const GenerateOptions options = LlamaModel::load(directory.path() / "model")->generate_options();
  SamplerOptions expected;
  expected.temperature = 0.6;
  EXPECT_EQ(options.sampler, expected);
  EXPECT_EQ(options.max_tokens, 7);
}

TEST(PublicLlama, GeneratesSavesAndGoesOn) {
  const auto model = LlamaModel::load(std::filesystem::path(TREEATTN_GOLDEN_DIR) / "llama" / "untied_scaled_f32");
  EXPECT_EQ(model->vocab(), 37);
  EXPECT_FALSE(model->has_tokenizer());
  EXPECT_THROW(model->encode("text"), Unavailable);
  EXPECT_THROW(LlamaModel::random("llama-7", 1), InvalidArgument);
  LlamaLoadOptions no_threads;
  no_threads.threads = -1;
  EXPECT_THROW(LlamaModel::random("llama-3.2-1b", 1, no_threads), InvalidArgument);
  EXPECT_THROW(LlamaModel::random("llama-3.2-1b", 1, {.gpu = -2}), InvalidArgument);
  LlamaLoadOptions no_format;
  no_format.weights = static_cast<WeightFormat>(9);
  try {
    LlamaModel::random("llama-3.2-1b", 1, no_format);
    ADD_FAILURE() << "weights in no format";
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "weights = 9; accepted: stored, bf16, int8");
  }
  EXPECT_THROW(stop_reason_name(static_cast<StopReason>(5)), InvalidArgument);
  ThreadPool one(1);
  EXPECT_THROW(LlamaSession(nullptr, self_communicator(), one), InvalidArgument);
  EXPECT_THROW(LlamaSession::load("/nowhere", nullptr, self_communicator(), one), InvalidArgument);
  const std::vector<std::int32_t> prompt = testing_model::random_tokens(100, 37, 3);
  GenerateOptions options;
  options.max_tokens = 20;
  options.ignore_eos = true;
  const auto on = [&](int ranks) {
    std::vector<std::int32_t> out;
    run_ranks(ranks, [&](std::shared_ptr<Communicator> world) {
      ThreadPool pool(1);
      LlamaSession session(model, world, pool);
      const GenerateResult result = session.generate(prompt, options);
      if (world->rank() == 0) out = result.tokens;
      EXPECT_EQ(session.tokens().size(), 120u);
    });
    return out;
  };
  EXPECT_EQ(on(1).size(), 20u);
  EXPECT_EQ(on(1), on(2));
}

// The others do not wait for a rank that cannot read the prompt.
TEST(PublicLlama, ATokenizerThatOneRankLacksIsSaidOnAll) {
  const TemporaryDirectory directory;
  const auto demo = std::filesystem::path(TREEATTN_TESTS_DIR) / "../tools/demo_model/model";
  for (const char* name : {"config.json", "model.safetensors"}) {
    std::filesystem::create_symlink(demo / name, directory.path() / name);
  }
  const auto without = LlamaModel::load(directory.path());
  std::ofstream(directory.path() / "tokenizer.json") << testing_model::byte_tokenizer_json();
  const auto with = LlamaModel::load(directory.path());
  const std::string says = "this model has no tokenizer (tokenizer.json); give tokens instead of text";
  const std::vector<std::int32_t> prompt = {'a', 'b'};
  run_ranks(2, [&](std::shared_ptr<Communicator> world) {
    ThreadPool pool(1);
    LlamaSession session(world->rank() == 1 ? without : with, world, pool);
    try {
      session.generate("ab");
      ADD_FAILURE() << "rank " << world->rank() << " went on";
    } catch (const InvalidArgument& error) {
      EXPECT_EQ(world->rank(), 0);
      EXPECT_EQ(error.what(), "rank 1: " + says);
    } catch (const Unavailable& error) {
      EXPECT_EQ(world->rank(), 1);
      EXPECT_EQ(error.what(), says);
    }
    GenerateOptions options;
    options.max_tokens = 2;
    EXPECT_EQ(session.generate(prompt, options).stats.prompt_tokens, 2);
  });
  ThreadPool pool(1);
  EXPECT_THROW(LlamaSession(without, self_communicator(), pool).generate("ab"), Unavailable);
}

// A vocabulary may be filled up with tokens that no tokenizer knows, and a model may say them.
TEST(PublicLlama, TokensWithoutATextHaveNone) {
  NEEDS_PCRE2();
  const TemporaryDirectory directory;
  const auto demo = std::filesystem::path(TREEATTN_TESTS_DIR) / "../tools/demo_model/model";
  for (const char* name : {"config.json", "model.safetensors"}) {
    std::filesystem::create_symlink(demo / name, directory.path() / name);
  }
  std::ofstream(directory.path() / "tokenizer.json") << testing_model::byte_tokenizer_json();
  const auto model = LlamaModel::load(directory.path());
  const auto text = [&](std::vector<std::int32_t> tokens) { return model->decode(tokens); };
  ASSERT_EQ(model->vocab(), 1536);
  EXPECT_EQ(text({'a', 1535, testing_model::kEndOfTurn, 'b'}), "ab");
  for (const std::int32_t token : {-1, 1536}) {
    try {
      text({'a', token});
      ADD_FAILURE() << "token " << token;
    } catch (const InvalidArgument& error) {
      EXPECT_EQ(error.what(), fmt::format("token {}; accepted: 0 to 1535", token));
    }
  }
}

TEST(StopScanner, HoldsBackWhatMayBecomeAStop) {
  StopScanner scanner({"END", "</s>"});
  EXPECT_EQ(scanner.next("abcE"), "abc");
  EXPECT_EQ(scanner.next("N"), "");
  EXPECT_EQ(scanner.next("e<"), "ENe");
  EXPECT_EQ(scanner.next("/s"), "");
  EXPECT_EQ(scanner.next(">tail"), "");
  EXPECT_TRUE(scanner.stopped());
  EXPECT_EQ(scanner.finish(), "");
  // Any cut of any text gives the same.
  const std::string text = "aaabaabaaababab";
  for (std::size_t step = 1; step <= text.size(); ++step) {
    StopScanner pieces({"abab", "baab"});
    std::string shown;
    for (std::size_t i = 0; i < text.size(); i += step) shown += pieces.next(text.substr(i, step));
    shown += pieces.finish();
    EXPECT_EQ(shown, text.substr(0, text.find("baab"))) << step;
  }
  // Also where one stop lies inside another: what is complete first ends the text.
  for (std::size_t step = 1; step <= 5; ++step) {
    const std::string line = "xabcd";
    StopScanner inside({"abcd", "bc"}), together({"c", "abc"});
    std::string shown, longer;
    for (std::size_t i = 0; i < line.size(); i += step) {
      shown += inside.next(line.substr(i, step));
      longer += together.next(line.substr(i, step));
    }
    EXPECT_EQ(shown, "xa") << step;
    EXPECT_EQ(longer, "x") << step;
    EXPECT_TRUE(inside.stopped() && together.stopped()) << step;
  }
  StopScanner none({});
  EXPECT_EQ(none.next("all"), "all");
}

TEST(SessionFile, ReadsWhatItWrote) {
  SavedText text;
  text.model = 77;
  text.generation = 78;
  text.pending = {1, 2, 3};
  text.transcripts[0].append(random_tokens(100, 301, 1), Way::kBlocks);
  text.transcripts[0].append(random_tokens(5, 301, 2), Way::kOneByOne);
  text.transcripts[0].append(random_tokens(70, 301, 2), Way::kBlocks);
  text.transcripts[3];
  const std::vector<std::byte> bytes = encode(text);
  EXPECT_EQ(parse_saved_text(bytes), text);
  for (std::size_t i = 0; i < bytes.size(); i += 7) {
    EXPECT_THROW(parse_saved_text(std::span(bytes).first(i)), InvalidArgument) << i;
    std::vector<std::byte> damaged = bytes;
    damaged[i] ^= std::byte{4};
    EXPECT_THROW(parse_saved_text(damaged), InvalidArgument) << i;
  }
}

TEST(Transcript, BlocksFollowTheGridAndTheWay) {
  Transcript text;
  text.append(random_tokens(100, 301, 1), Way::kBlocks);
  text.append(random_tokens(2, 301, 1), Way::kOneByOne);
  text.append(random_tokens(1, 301, 1), Way::kOneByOne);
  text.append(random_tokens(60, 301, 1), Way::kBlocks);
  EXPECT_EQ(text.segments().size(), 3u);
  const auto alone = [](std::int64_t at) { return Block{at, 1, Way::kOneByOne}; };
  const std::vector<Block> want = {{0, 64}, {64, 36}, alone(100), alone(101), alone(102), {103, 25}, {128, 35}};
  EXPECT_EQ(text.blocks(0, 163, 64), want);
  EXPECT_EQ(text.blocks(64, 64, 64), std::vector<Block>(want.begin() + 1, want.end() - 1));
  text.truncate(101);
  EXPECT_EQ(text.blocks(64, 37, 64), std::vector<Block>(want.begin() + 1, want.begin() + 3));
}

}  // namespace
}  // namespace treeattn::model
