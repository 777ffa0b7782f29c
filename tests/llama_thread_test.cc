// SPDX-License-Identifier: Apache-2.0
// A Llama over ranks that are threads: the same bits on any number of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "model/agreement.h"
#include "model/llama.h"
#include "model_text.h"
#include "small_llama.h"
#include "temporary_directory.h"
#include "thinning.h"
#include "treeattn/error.h"

namespace treeattn::model {
namespace {

using testing_model::difference;
using testing_model::largest;
using testing_model::random_tokens;
using testing_model::same_bits;
using testing_model::small_config;
using testing_model::small_options;
using testing_model::SmallModel;
using testing_model::Text;

// One rank of one run.
struct Rank {
  Rank(const SmallModel& model, std::shared_ptr<Communicator> world, const LlamaOptions& options)
      : pool(1), ops(kernels::cpu_model_ops(pool)), llama(model.weights, std::move(world), *ops, pool, options) {}

  ThreadPool pool;
  std::unique_ptr<kernels::ModelOps> ops;
  Llama llama;
};

void greedy(Llama& llama, SequenceId id, std::vector<float> logits, std::size_t count, Text& text) {
  while (text.tokens.size() < count) {
    const std::int32_t token = largest(logits);
    text.tokens.push_back(token);
    text.logits.push_back(logits);
    if (text.tokens.size() < count) llama.decode({&id, 1}, {&token, 1}, logits);
  }
}

Text generate_on(int ranks, const SmallModel& model, const LlamaOptions& options, std::int64_t prompt,
                 std::size_t count, Way way = Way::kBlocks) {
  std::vector<Text> texts(static_cast<std::size_t>(ranks));
  run_ranks(ranks, [&](std::shared_ptr<Communicator> world) {
    Text& text = texts[static_cast<std::size_t>(world->rank())];
    Rank rank(model, world, options);
    const SequenceId id = rank.llama.add_sequence();
    std::vector<float> logits(static_cast<std::size_t>(model.weights->config().vocab));
    rank.llama.prefill(id, random_tokens(prompt, model.weights->config().vocab, 7), logits, way);
    greedy(rank.llama, id, logits, count, text);
  });
  for (const Text& text : texts) EXPECT_EQ(difference(text, texts[0]), "");
  return texts[0];
}

// The headline: 200 tokens (100 in a thinned run), the same on any number of ranks, down to the bits of the logits.
TEST(Llama, SameTextOnAnyNumberOfRanks) {
  const SmallModel model;
  const LlamaOptions options = small_options();
  const std::size_t tokens = thinning() > 1 ? 100 : 200;
  const Text one = generate_on(1, model, options, 333, tokens);
  for (const int ranks : {2, 3, 4, 8}) {
    EXPECT_EQ(difference(one, generate_on(ranks, model, options, 333, tokens)), "") << ranks << " ranks";
  }
  // It is a text: not one token over and over.
  std::vector<std::int32_t> kinds = one.tokens;
  std::sort(kinds.begin(), kinds.end());
  EXPECT_GT(std::unique(kinds.begin(), kinds.end()) - kinds.begin(), 10);
}

TEST(Llama, SameTextByEveryStrategyThatPromisesIt) {
  const SmallModel model;
  LlamaOptions options = small_options();
  const Text want = generate_on(1, model, options, 150, 30);
  for (const Strategy strategy : kAllStrategies) {
    if (!same_bits(strategy)) continue;
    options.attention.strategy = strategy;
    EXPECT_EQ(difference(want, generate_on(3, model, options, 150, 30)), "") << strategy_name(strategy);
  }
  options.attention.strategy = Strategy::kAuto;
  EXPECT_EQ(difference(want, generate_on(3, model, options, 150, 30)), "");
}

TEST(Llama, SameTextWithEveryTypeOfTheCacheAndOfTheWeights) {
  LlamaConfig tied = small_config();
  tied.tied_embeddings = true;
  tied.rope_scaling = RopeScaling{8.0, 1.0, 4.0, 64};
  const SmallModel int8(tied, DType::kFloat32, WeightFormat::kInt8);
  for (const DType type : kAllDTypes) {
    LlamaOptions options = small_options();
    options.kv_type = type;
    const Text one = generate_on(1, int8, options, 130, 20);
    EXPECT_EQ(difference(one, generate_on(3, int8, options, 130, 20)), "") << dtype_name(type);
  }
}

// The cut into pieces, who collects what, and the calls a prompt comes in (where they end on the grid): no bit changes.
TEST(Llama, PrefillInPiecesIsPrefillAtOnce) {
  const SmallModel model;
  LlamaOptions options = small_options();
  options.chunks_per_piece = 1000;
  const Text at_once = generate_on(1, model, options, 500, 3);
  for (const int pieces : {1, 2, 5}) {
    options.chunks_per_piece = pieces;
    EXPECT_EQ(difference(at_once, generate_on(1, model, options, 500, 3)), "");
    options.gather_kv = pieces == 2;
    EXPECT_EQ(difference(at_once, generate_on(2, model, options, 500, 3)), "");
  }

  const std::vector<std::int32_t> prompt = random_tokens(500, small_config().vocab, 7);
  run_ranks(3, [&](std::shared_ptr<Communicator> world) {
    Rank rank(model, world, small_options());
    const SequenceId id = rank.llama.add_sequence();
    std::vector<float> logits(static_cast<std::size_t>(small_config().vocab));
    rank.llama.prefill(id, std::span(prompt).first(128), {});
    rank.llama.prefill(id, std::span(prompt).subspan(128), logits);
    EXPECT_TRUE(same_bits(logits, at_once.logits[0]));
  });
}

TEST(Llama, PrefillOneByOneIsDecode) {
  const SmallModel model;
  const std::vector<std::int32_t> prompt = random_tokens(200, small_config().vocab, 7);
  std::vector<float> decoded(static_cast<std::size_t>(small_config().vocab));
  {
    Rank rank(model, self_communicator(), small_options());
    const SequenceId id = rank.llama.add_sequence();
    for (const std::int32_t token : prompt) rank.llama.decode({&id, 1}, {&token, 1}, decoded);
  }
  for (const int ranks : {1, 3}) {
    const Text text = generate_on(ranks, model, small_options(), 200, 1, Way::kOneByOne);
    EXPECT_TRUE(same_bits(text.logits[0], decoded)) << ranks;
  }
  // By blocks the kernels round in another order; the numbers are the same but for that.
  const Text blocks = generate_on(1, model, small_options(), 200, 1);
  for (std::size_t i = 0; i < decoded.size(); ++i) EXPECT_NEAR(blocks.logits[0][i], decoded[i], 0.05) << i;
}

TEST(Llama, ABatchHasTheBitsOfEachSequenceAlone) {
  const SmallModel model;
  const std::int64_t prompts[] = {1, 64, 190};
  std::vector<Text> alone(3);
  const auto vocab = static_cast<std::size_t>(small_config().vocab);
  for (std::size_t i = 0; i < 3; ++i) alone[i] = generate_on(1, model, small_options(), prompts[i], 20);
  run_ranks(2, [&](std::shared_ptr<Communicator> world) {
    Rank rank(model, world, small_options());
    std::vector<SequenceId> ids;
    for (const std::int64_t length : prompts) {
      ids.push_back(rank.llama.add_sequence());
      rank.llama.prefill(ids.back(), random_tokens(length, small_config().vocab, 7), {});
    }
    for (std::size_t step = 0; step + 1 < 20; ++step) {
      std::vector<std::int32_t> tokens;
      for (const Text& text : alone) tokens.push_back(text.tokens[step]);
      std::vector<float> logits(3 * vocab);
      rank.llama.decode(ids, tokens, logits);
      for (std::size_t i = 0; i < 3; ++i) {
        const std::vector<float> mine(logits.begin() + static_cast<std::ptrdiff_t>(i * vocab),
                                      logits.begin() + static_cast<std::ptrdiff_t>((i + 1) * vocab));
        EXPECT_TRUE(same_bits(mine, alone[i].logits[step + 1])) << i << " at " << step;
      }
    }
  });
}

TEST(Llama, SavedOnThreeRanksGoesOnOnTwo) {
  const SmallModel model;
  const Text want = generate_on(1, model, small_options(), 300, 80);
  const TemporaryDirectory directory;
  run_ranks(3, [&](std::shared_ptr<Communicator> world) {
    Rank rank(model, world, small_options());
    const SequenceId id = rank.llama.add_sequence();
    std::vector<float> logits(want.logits[0].size());
    rank.llama.prefill(id, random_tokens(300, small_config().vocab, 7), logits);
    Text text;
    greedy(rank.llama, id, logits, 40, text);
    rank.llama.save(directory.path(), {&text.tokens.back(), 1});
  });
  run_ranks(2, [&](std::shared_ptr<Communicator> world) {
    ThreadPool pool(1);
    const auto ops = kernels::cpu_model_ops(pool);
    std::vector<std::int32_t> pending;
    const auto llama = Llama::load(directory.path(), model.weights, world, *ops, pool, {}, &pending);
    const SequenceId id = llama->sequences().front();
    ASSERT_EQ(pending, std::vector<std::int32_t>{want.tokens[39]});
    EXPECT_EQ(llama->transcript(id).length(), 300 + 39);
    Text text{{want.tokens.begin(), want.tokens.begin() + 40}, {want.logits.begin(), want.logits.begin() + 40}};
    std::vector<float> logits(want.logits[0].size());
    llama->decode({&id, 1}, pending, logits);
    greedy(*llama, id, logits, 80, text);
    EXPECT_EQ(difference(text, want), "");
  });

  LlamaConfig other = small_config();
  other.rope_theta *= 2;
  SmallModel stranger(other);
  EXPECT_THROW(Llama::load(directory.path(), stranger.weights, self_communicator(), *stranger.ops, stranger.pool),
               BadFile);
}

// A rank is lost while it generates; the others compute what it had again, and the text does not change. The prompt
// comes in two turns with decoded tokens between, so that blocks begin inside chunks.
class Conversation {
 public:
  static constexpr std::int64_t kFirst = 150, kAnswer = 60, kSecond = 170;
  static constexpr std::size_t kCount = 100;

  explicit Conversation(const SmallModel& model) : tokens_(random_tokens(kFirst + kAnswer + kSecond, 301, 5)) {
    Rank rank(model, self_communicator(), small_options());
    want = run(rank.llama, [](std::size_t) { return false; }).value();
  }

  // Goes on from whatever is in the cache. leave(number of tokens said): whether to be lost now.
  std::optional<Text> run(Llama& llama, const std::function<bool(std::size_t)>& leave) const {
    if (llama.sequences().empty()) llama.add_sequence();
    const SequenceId id = llama.sequences().front();
    Text text;
    std::vector<float> logits(301);
    const auto said = [&] { return llama.transcript(id).length(); };
    for (;;) {
      try {
        if (leave(0)) return {};
        if (said() < kFirst) llama.prefill(id, prompt(said(), kFirst), {});
        while (said() < kFirst + kAnswer) llama.decode({&id, 1}, prompt(said(), said() + 1), logits);
        if (said() < static_cast<std::int64_t>(tokens_.size())) {
          llama.prefill(id, prompt(said(), static_cast<std::int64_t>(tokens_.size())), logits);
          text.tokens = {largest(logits)};
          text.logits = {logits};
        }
        for (;;) {
          const auto done = static_cast<std::size_t>(said()) - tokens_.size();
          text.tokens.resize(done + 1);
          text.logits.resize(done + 1);
          if (done + 1 == kCount) return text;
          if (leave(done + 1)) return {};
          llama.decode({&id, 1}, {&text.tokens.back(), 1}, logits);
          text.tokens.push_back(largest(logits));
          text.logits.push_back(logits);
        }
      } catch (const LostRanks&) {
        llama.recover();
      }
    }
  }

  Text want;

 private:
  std::span<const std::int32_t> prompt(std::int64_t first, std::int64_t end) const {
    return std::span(tokens_).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(end - first));
  }
  std::vector<std::int32_t> tokens_;
};

TEST(LlamaLoss, SurvivorsGoOnWithTheSameText) {
  const SmallModel model;
  const Conversation conversation(model);
  RankOptions patience;
  patience.deadline = Seconds(20.0);
  for (const int ranks : {2, 3, 4}) {
    if (thinning() > 1 && ranks == 4) continue;
    for (const int lost : {0, ranks - 1}) {
      std::atomic<int> finished = 0;
      run_ranks(
          ranks,
          [&](std::shared_ptr<Communicator> world) {
            const bool mortal = world->rank() == lost;
            Rank rank(model, world, small_options());
            const auto text = conversation.run(
                rank.llama, [&](std::size_t said) { return mortal && said == 50 + std::size_t(lost); });
            if (!text) return;
            EXPECT_EQ(difference(*text, conversation.want), "") << ranks << " ranks, lost " << lost;
            EXPECT_EQ(rank.llama.communicator()->size(), ranks - 1);
            ++finished;
          },
          patience);
      EXPECT_EQ(finished, ranks - 1);
    }
  }
}

// Two, one after the other.
TEST(LlamaLoss, TwoRanksInTurn) {
  const SmallModel model;
  const Conversation conversation(model);
  RankOptions patience;
  patience.deadline = Seconds(20.0);
  std::atomic<int> finished = 0;
  run_ranks(
      4,
      [&](std::shared_ptr<Communicator> world) {
        const int me = world->rank();
        Rank rank(model, world, small_options());
        const auto text = conversation.run(
            rank.llama, [&](std::size_t said) { return (me == 1 && said == 20) || (me == 2 && said == 21); });
        if (!text) return;
        EXPECT_EQ(difference(*text, conversation.want), "");
        EXPECT_EQ(rank.llama.communicator()->size(), 2);
        ++finished;
      },
      patience);
  EXPECT_EQ(finished, 2);
}

TEST(Llama, RanksThatDisagreeAreNamed) {
  run_ranks(4, [](std::shared_ptr<Communicator> world) {
    require_agreement(
        *world, [] { return 7; }, "the logits");
    try {
      require_agreement(
          *world, [&] { return world->rank() == 2 ? 8 : 7; }, "the logits");
      ADD_FAILURE() << "not noticed";
    } catch (const Error& error) {
      EXPECT_EQ(std::string(error.what()),
                "the ranks do not agree on the logits: rank 2 of 4 has other bits than the rest");
    }
  });
}

TEST(Llama, BadCallsAreRefusedBeforeAnyWork) {
  const SmallModel model;
  Rank rank(model, self_communicator(), small_options());
  Llama& llama = rank.llama;
  const SequenceId id = llama.add_sequence();
  std::vector<float> logits(301);
  const std::vector<std::int32_t> beyond{301}, negative{-1}, fine{3}, long_text(4097, 3);
  EXPECT_THROW(llama.prefill(id, {}, logits), InvalidArgument);
  EXPECT_THROW(llama.prefill(id, beyond, logits), InvalidArgument);
  EXPECT_THROW(llama.prefill(id, negative, logits), InvalidArgument);
  EXPECT_THROW(llama.prefill(id, long_text, logits), InvalidArgument);
  EXPECT_THROW(llama.prefill(id + 1, fine, logits), InvalidArgument);
  EXPECT_THROW(llama.prefill(id, fine, std::span(logits).first(300)), InvalidArgument);
  EXPECT_THROW(llama.decode({&id, 1}, beyond, logits), InvalidArgument);
  EXPECT_THROW(llama.decode({&id, 1}, {}), InvalidArgument);
  EXPECT_THROW(llama.decode({}, {}), InvalidArgument);
  EXPECT_THROW(llama.decode({&id, 1}, fine, std::span(logits).first(300)), InvalidArgument);
  const SequenceId other = llama.add_sequence();
  const std::vector<SequenceId> twice{id, other, id};
  try {
    llama.decode(twice, std::vector<std::int32_t>{3, 4, 5});
    ADD_FAILURE() << "two tokens for one sequence";
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(error.what(), "sequence = " + std::to_string(id) + " more than once in a step; accepted: once");
  }
  EXPECT_EQ(llama.transcript(id).length(), 0);
  EXPECT_EQ(llama.cache().length(other), 0);
  try {
    llama.prefill(id, beyond, logits);
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "token = 301 in the prompt; accepted: 0 to 300");
  }
}

}  // namespace
}  // namespace treeattn::model
