// SPDX-License-Identifier: Apache-2.0
// Ranks that are threads, lost while they speak or between two prompts.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdio>
#include <functional>
#include <latch>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "comm/transport.h"
#include "passing_transport.h"
#include "session_rank.h"
#include "temporary_directory.h"
#include "thinning.h"
#include "treeattn/error.h"

namespace treeattn::model {
namespace {

using testing_model::generate_on;
using testing_model::random_tokens;
using testing_model::SessionRank;
using testing_model::SmallModel;
using testing_model::tokens_of;

// The listener of one rank ends it by throwing: to the others it is gone.
struct Gone {};

// Says so many tokens before that.
TextListener gone_after(int words) {
  TextListener listener;
  listener.token = [said = 0, words](const TokenChoice&) mutable {
    if (++said == words) throw Gone();
  };
  return listener;
}

GenerateOptions recovering(std::int64_t tokens) {
  GenerateOptions options = tokens_of(tokens);
  options.recover = true;
  return options;
}

RankOptions patient() {
  RankOptions options;
  options.deadline = Seconds(20.0);
  return options;
}

TEST(SessionLoss, TheTextGoesOnUnchanged) {
  const SmallModel model;
  const auto first = generate_on(1, model, tokens_of(40), 200);
  for (const int ranks : {2, 4}) {
    for (const std::size_t last_words : {0u, 1u, 25u}) {
      std::atomic<int> finished = 0;
      run_ranks(
          ranks,
          [&](std::shared_ptr<Communicator> world) {
            const bool mortal = world->rank() == ranks / 2;
            SessionRank rank(model, world, nullptr);
            const GenerateOptions options = recovering(40);
            std::size_t said = 0;
            TextListener listener;
            std::vector<std::int32_t> heard;
            listener.prefill = [&](std::int64_t, std::int64_t) {
              if (mortal && last_words == 0) throw Gone();
            };
            listener.token = [&](const TokenChoice& choice) {
              heard.push_back(choice.token);
              if (mortal && ++said == last_words) throw Gone();
            };
            try {
              const GenerateResult result = rank.session.generate(random_tokens(200, 301, 7), options, listener);
              EXPECT_EQ(result.tokens, first) << ranks << " ranks, after " << last_words;
              EXPECT_EQ(heard, first);
              EXPECT_EQ(result.stats.lost, std::vector<int>{ranks / 2});
              // And a second prompt after that.
              EXPECT_EQ(rank.session.generate(random_tokens(70, 301, 8), options).tokens.size(), 40u);
              ++finished;
            } catch (const Gone&) {
            }
          },
          patient());
      EXPECT_EQ(finished, ranks - 1);
    }
  }
}

// A group without a rank counts from 0 again; those who are lost from it are named as they were first.
TEST(SessionLoss, LostRanksKeepTheirNumbers) {
  const SmallModel model;
  std::atomic<int> finished = 0;
  run_ranks(
      5,
      [&](std::shared_ptr<Communicator> world) {
        SessionRank rank(model, world, nullptr);
        const GenerateOptions options = recovering(20);
        const int me = world->rank();
        constexpr int kNever = 1000, kFirst[] = {kNever, 3, kNever, 10, kNever};
        try {
          const auto first = rank.session.generate(random_tokens(70, 301, 7), options, gone_after(kFirst[me]));
          EXPECT_EQ(first.stats.lost, (std::vector<int>{1, 3}));
          const auto second =
              rank.session.generate(random_tokens(70, 301, 8), options, gone_after(me == 2 ? 5 : kNever));
          EXPECT_EQ(second.stats.lost, std::vector<int>{2});
          ++finished;
        } catch (const Gone&) {
        }
      },
      patient());
  EXPECT_EQ(finished, 2);
}

TEST(SessionLoss, ARankMayGoBetweenTwoPrompts) {
  const SmallModel model;
  const auto first = random_tokens(100, 301, 7), second = random_tokens(70, 301, 8);
  SessionRank alone(model, self_communicator(), nullptr);
  alone.session.generate(first, tokens_of(10));
  const std::vector<std::int32_t> want = alone.session.generate(second, tokens_of(20)).tokens;
  run_ranks(3, [&](std::shared_ptr<Communicator> world) {
    SessionRank rank(model, world, nullptr);
    rank.session.generate(first, tokens_of(10));
    if (world->rank() == 1) return;
    const GenerateOptions options = recovering(20);
    const GenerateResult result = rank.session.generate(second, options);
    EXPECT_EQ(result.tokens, want);
    EXPECT_EQ(result.stats.lost, std::vector<int>{1});
  });
}

TEST(SessionLoss, WithoutRecoverItIsAnError) {
  const SmallModel model;
  std::atomic<int> named = 0;
  run_ranks(
      3,
      [&](std::shared_ptr<Communicator> world) {
        SessionRank rank(model, world, nullptr);
        const TextListener listener = world->rank() == 1 ? gone_after(1) : TextListener();
        try {
          rank.session.generate(random_tokens(20, 301, 7), tokens_of(40), listener);
          ADD_FAILURE() << "nobody was missed";
        } catch (const LostRanks& error) {
          named += error.ranks() == std::vector<int>{1};
        } catch (const Gone&) {
        }
      },
      patient());
  EXPECT_EQ(named, 2);
}

// There is nothing to go on with, and nothing to cut off.
TEST(SessionLoss, ABadFirstCallIsRefusedByThoseWhoAreLeft) {
  const SmallModel model;
  const auto prompt = random_tokens(20, 301, 7);
  const auto want = generate_on(1, model, tokens_of(5), 20);
  run_ranks(3, [&](std::shared_ptr<Communicator> world) {
    if (world->rank() == 1) return;
    SessionRank rank(model, world, nullptr);
    const GenerateOptions options = recovering(5);
    EXPECT_THROW(rank.session.generate({}, options), InvalidArgument);
    EXPECT_EQ(rank.session.generate(prompt, options).tokens, want);
  });
}

// By then some of what was lost is zeros.
TEST(SessionLoss, ARecoveryThatAListenerBrokeOffIsFinishedLater) {
  struct Enough {};
  const SmallModel model;
  SessionRank alone(model, self_communicator(), nullptr);
  alone.session.generate(random_tokens(200, 301, 7), tokens_of(60));
  const std::vector<std::int32_t> want = alone.session.tokens();
  const auto is_part_of_it = [&](const std::vector<std::int32_t>& text) {
    return text.size() > 210 && std::equal(text.begin(), text.end(), want.begin());
  };
  std::atomic<int> broken_off = 0;
  for (const int ranks : {2, 3}) {
    const TemporaryDirectory directory;
    run_ranks(ranks, [&](std::shared_ptr<Communicator> world) {
      SessionRank rank(model, world, nullptr);
      const GenerateOptions options = recovering(20);
      TextListener listener = world->rank() == 0 ? gone_after(5) : TextListener();
      listener.recovery = [&](std::int64_t, std::int64_t) {
        EXPECT_THROW(rank.session.save(directory.path()), Error);
        throw Enough();
      };
      try {
        rank.session.generate(random_tokens(200, 301, 7), options, listener);
      } catch (const Gone&) {
        return;
      } catch (const Enough&) {
        ++broken_off;
      }
      rank.session.save(directory.path());
      rank.session.generate({}, options);
      EXPECT_TRUE(is_part_of_it(rank.session.tokens()));
    });
    Session saved =
        Session::load(directory.path(), model.weights, self_communicator(), *alone.ops, alone.pool, nullptr);
    saved.generate({}, tokens_of(20));
    EXPECT_TRUE(is_part_of_it(saved.tokens()));
  }
  EXPECT_EQ(broken_off, 3);
}

// Asks before every message: `change` may end the rank, or give another content of the same size.
class WatchedTransport final : public testing::PassingTransport {
 public:
  using Content = std::shared_ptr<std::vector<std::byte>>;
  using Change = std::function<Content(std::span<const std::byte> data)>;  // null: as it is
  WatchedTransport(std::shared_ptr<comm::Transport> inner, Change change)
      : PassingTransport(std::move(inner)), change_(std::move(change)) {}

  std::shared_ptr<comm::Operation> send(int to, int tag, std::span<const std::byte> data,
                                        std::shared_ptr<const void> owner) override {
    if (const Content other = change_(data)) return PassingTransport::send(to, tag, *other, other);
    return PassingTransport::send(to, tag, data, std::move(owner));
  }

 private:
  const Change change_;
};

// Ranks as threads, of which some have their messages watched.
void run_watched(int ranks, const std::map<int, WatchedTransport::Change>& changes,
                 const std::function<void(std::shared_ptr<Communicator>)>& body) {
  const auto watch = [&](int rank, std::shared_ptr<comm::Transport> transport) -> std::shared_ptr<comm::Transport> {
    const auto change = changes.find(rank);
    if (change == changes.end()) return transport;
    return std::make_shared<WatchedTransport>(std::move(transport), change->second);
  };
  testing::run_ranks_through(ranks, watch, [&](const std::shared_ptr<Communicator>& world) {
    try {
      body(world);
    } catch (const Gone&) {
    }
  });
}

// Ranks 0 to 2, of which rank 1 comes to an end when it would send a message after so many, and of those that rank 2
// sends are changed.
void run_with_mortal_rank(int messages, const std::function<void(std::shared_ptr<Communicator>)>& body,
                          const WatchedTransport::Change& change = {}) {
  const auto end = [left = messages](std::span<const std::byte>) mutable -> WatchedTransport::Content {
    if (left-- == 0) throw Gone();
    return nullptr;
  };
  std::map<int, WatchedTransport::Change> changes = {{1, end}};
  if (change) changes[2] = change;
  run_watched(3, changes, body);
}

// Wherever it came in a step: of those who are left, one may have a token more than another, or none to go on with.
TEST(SessionLoss, AfterTheErrorALaterCallMayRecover) {
  const SmallModel model;
  const auto prompt = random_tokens(20, 301, 7), second = random_tokens(10, 301, 8);
  SessionRank alone(model, self_communicator(), nullptr);
  alone.session.generate(prompt, tokens_of(60));
  const std::vector<std::int32_t> want = alone.session.tokens();
  for (const bool with_prompt : {false, true}) {
    for (int messages = 20; messages < 40; ++messages) {
      std::mutex mutex;
      std::vector<std::vector<std::int32_t>> texts;
      run_with_mortal_rank(messages, [&](const std::shared_ptr<Communicator>& world) {
        SessionRank rank(model, world, nullptr);
        if (world->rank() == 1) rank.session.generate(prompt, tokens_of(30));
        EXPECT_THROW(rank.session.generate(prompt, tokens_of(30)), LostRanks);
        const GenerateOptions options = recovering(5);
        const auto next = std::span(second).first(with_prompt ? second.size() : 0);
        EXPECT_NO_THROW(EXPECT_EQ(rank.session.generate(next, options).stats.lost, std::vector<int>{1}));
        const std::lock_guard lock(mutex);
        texts.push_back(rank.session.tokens());
      });
      ASSERT_EQ(texts.size(), 2u) << messages;
      EXPECT_EQ(texts[0], texts[1]) << messages;
      EXPECT_TRUE(with_prompt || std::equal(texts[0].begin(), texts[0].end(), want.begin())) << messages;
    }
  }
}

// Of those who are left one may have shown the token that both take again, and both are asked to stop there.
TEST(SessionLoss, AnInterruptInARecoveryEndsTheTextOnAll) {
  const SmallModel model;
  const auto prompt = random_tokens(100, 301, 7);
  int interrupted = 0;
  for (int messages = 20; messages < 40; ++messages) {
    SCOPED_TRACE(messages);
    std::atomic<bool> interrupt = false;
    std::mutex mutex;
    std::vector<std::vector<std::int32_t>> texts;
    run_with_mortal_rank(messages, [&](const std::shared_ptr<Communicator>& world) {
      SessionRank rank(model, world, nullptr);
      GenerateOptions options = recovering(30);
      options.interrupt = &interrupt;
      TextListener listener;
      listener.recovery = [&](std::int64_t, std::int64_t) { interrupt = true; };
      const GenerateResult result = rank.session.generate(prompt, options, listener);
      // What is lost while the prompt is read has not been finished, and is not recovered.
      EXPECT_EQ(result.reason, interrupt ? StopReason::kInterrupted : StopReason::kMaxTokens);
      EXPECT_EQ(result.stats.lost, std::vector<int>{1});
      const std::lock_guard lock(mutex);
      texts.push_back(rank.session.tokens());
    });
    ASSERT_EQ(texts.size(), 2u);
    EXPECT_EQ(texts[0], texts[1]);
    interrupted += interrupt ? 1 : 0;
  }
  EXPECT_GE(interrupted, 10);
}

// Rank 1 ends when rank 0 has heard from all that the call is refused, and rank 2 not: rank 0 makes its next call while
// rank 2 is about to ask for the reasons again, and each would take the other's call for its own.
TEST(SessionLoss, WhoHasNotHeardOfARefusalIsACallBehind) {
  const SmallModel model;
  const auto prompt = random_tokens(20, 301, 7);
  std::atomic<bool> refused = false;
  const auto end = [&, sent = 0](std::span<const std::byte>) mutable -> WatchedTransport::Content {
    if (sent++ == 0) return nullptr;
    while (!refused) std::this_thread::yield();
    throw Gone();
  };
  run_watched(3, {{1, end}}, [&](const std::shared_ptr<Communicator>& world) {
    SessionRank rank(model, world, nullptr);
    if (world->rank() == 0) {
      EXPECT_THROW(rank.session.generate({}, recovering(5)), InvalidArgument);
      refused = true;
    }
    try {
      rank.session.generate(world->rank() == 0 ? prompt : std::vector<std::int32_t>(), recovering(5));
      ADD_FAILURE() << "rank " << world->rank() << " went on alone";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("lost between two prompts"), std::string::npos) << error.what();
    }
  });
}

// Rank 1 is gone, and rank 2 goes while the others agree on what is left of several texts.
TEST(LlamaLoss, ASecondLossInARecoveryLeavesEveryText) {
  const SmallModel model;
  const std::vector<std::int32_t> words = {1, 2, 3};
  std::vector<float> want;
  const auto take_part = [&](const std::shared_ptr<Communicator>& world, std::latch& all_are_ready,
                             std::atomic<bool>& recovering) {
    SessionRank rank(model, world, nullptr);
    Llama& llama = rank.session.llama();
    std::vector<SequenceId> ids = llama.sequences();
    while (ids.size() < words.size()) ids.push_back(llama.add_sequence());
    for (const SequenceId id : ids) llama.prefill(id, random_tokens(10 + 60 * id, 301, 7), {});
    all_are_ready.arrive_and_wait();
    if (world->rank() == 1) return;
    std::vector<float> logits(words.size() * 301);
    for (bool said = false; !said;) {
      try {
        llama.decode(ids, words, logits);
        said = true;
      } catch (const LostRanks&) {
        if (world->rank() == 2) recovering = true;
        llama.recover();
        for (const SequenceId id : ids) EXPECT_EQ(llama.transcript(id).length(), 10 + 60 * id);
      }
    }
    if (world->size() == 1) want = logits;
    EXPECT_EQ(logits, want);
  };
  std::atomic<bool> never = false;
  std::latch alone(1);
  take_part(self_communicator(), alone, never);
  for (int messages = 0; messages < 24; messages += static_cast<int>(thinning())) {
    SCOPED_TRACE(messages);
    std::latch all_are_ready(4);
    std::atomic<bool> recovering = false;
    const auto end = [&, left = messages](std::span<const std::byte>) mutable -> WatchedTransport::Content {
      if (recovering && left-- == 0) throw Gone();
      return nullptr;
    };
    run_watched(4, {{2, end}},
                [&](const std::shared_ptr<Communicator>& world) { take_part(world, all_are_ready, recovering); });
  }
}

// Rank 1 is gone when one of the others has changed the strategy, and the other was about to.
TEST(LlamaLoss, AChangeOfAttentionThatNotAllHaveMadeIsTakenBack) {
  const SmallModel model;
  const std::int32_t word = 1;
  std::vector<float> want;
  const auto take_part = [&](const std::shared_ptr<Communicator>& world, std::latch& all_are_ready, int ahead) {
    SessionRank rank(model, world, nullptr);
    Llama& llama = rank.session.llama();
    const SequenceId id = llama.sequences().front();
    const auto attend_by = [&](Strategy strategy) { llama.change_attention({.strategy = strategy}); };
    attend_by(Strategy::kMerge);
    llama.prefill(id, random_tokens(100, 301, 7), {});
    all_are_ready.arrive_and_wait();
    if (world->rank() == 1) return;
    if (world->rank() == ahead) attend_by(Strategy::kGather);
    if (world->size() > 1) {
      EXPECT_THROW(world->barrier(), LostRanks);
      llama.recover();
    }
    EXPECT_EQ(llama.options().attention.strategy, Strategy::kMerge);
    std::vector<float> logits(2 * 301);
    llama.decode({&id, 1}, {&word, 1}, std::span(logits).first(301));
    attend_by(Strategy::kButterfly);
    llama.decode({&id, 1}, {&word, 1}, std::span(logits).last(301));
    if (world->size() == 1) want = logits;
    EXPECT_EQ(logits, want);
  };
  std::latch alone(1);
  take_part(self_communicator(), alone, -1);
  for (const int ahead : {0, 2}) {
    std::latch all_are_ready(3);
    run_ranks(3, [&](const std::shared_ptr<Communicator>& world) {
      EXPECT_NO_THROW(take_part(world, all_are_ready, ahead));
    });
  }
}

// A rank of another build, or somebody who poses as one: whatever a message says in the place of what it should, the
// others go on or have an error that says so. Messages of a recovery have lengths, counts and numbers of all kinds.
TEST(SessionLoss, ALieEndsInAnError) {
  const SmallModel model;
  const auto prompt = random_tokens(20, 301, 7);
  const auto take_part = [&](const std::shared_ptr<Communicator>& world) {
    world->set_deadline(Seconds(0.5));  // where a lie leaves ranks waiting for each other
    SessionRank rank(model, world, nullptr);
    try {
      rank.session.generate(prompt, recovering(8));
    } catch (const Error&) {
    } catch (const std::exception& error) {
      ADD_FAILURE() << "rank " << world->rank() << ": " << error.what();
    }
  };
  int sent = 0, lies = 0;
  const auto lie_at = [&](int message, std::int64_t lie) {
    sent = 0;
    run_with_mortal_rank(20, take_part, [&](std::span<const std::byte> data) -> WatchedTransport::Content {
      if (sent++ != message || data.empty()) return nullptr;
      ++lies;
      auto content = std::make_shared<std::vector<std::byte>>(data.size());
      for (std::size_t i = 0; i < data.size(); ++i) (*content)[i] = std::as_bytes(std::span(&lie, 1))[i % sizeof lie];
      return content;
    });
  };
  lie_at(-1, 0);
  const int all = sent;
  for (int message = 0; message < std::min(all, 60); message += static_cast<int>(thinning())) {
    SCOPED_TRACE(message);
    lie_at(message, -2);                                        // a text without an end, too
    if (message >= 15) lie_at(message, std::int64_t{1} << 40);  // about where the loss comes
  }
  std::printf("%d messages, %d lies\n", all, lies);
  EXPECT_GT(lies, 0);
}

// A listener may have ranks of its own, whose loss is no business of the text.
TEST(SessionLoss, OfOthersThatAListenerKnows) {
  const SmallModel model;
  SessionRank rank(model, self_communicator(), nullptr);
  TextListener listener;
  listener.token = [](const TokenChoice&) { throw LostRanks("rank 3 of 4 is gone", {3}, {3}); };
  for (const GenerateOptions& options : {tokens_of(5), recovering(5)}) {
    EXPECT_THROW(rank.session.generate(random_tokens(20, 301, 7), options, listener), LostRanks);
  }
}

}  // namespace
}  // namespace treeattn::model
