// SPDX-License-Identifier: Apache-2.0
// Attention over a sharded cache with ranks as threads: every strategy, many rank counts, the same bits.
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <numeric>
#include <string>
#include <thread>

#include "decode_loop.h"
#include "expect_on_ranks.h"
#include "parallel_checks.h"
#include "prefill_checks.h"
#include "temporary_directory.h"
#include "thinning.h"
#include "treeattn/error.h"
#include "treeattn/state.h"

namespace treeattn {
namespace {

using testing_parallel::expect_on_ranks;
using testing_parallel::Failures;
using testing_parallel::Loop;
using testing_parallel::Output;
using testing_parallel::PreparedCase;

class RankCount : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, RankCount, testing::Values(1, 2, 3, 4, 5, 7, 8, 16), testing::PrintToStringParamName());

// The whole list on four ranks, a part of it, another one each time, on the others.
TEST_P(RankCount, EveryStrategyOnTheCaseList) {
  const int ranks = GetParam();
  const std::size_t every = (ranks == 4 ? 1 : 5) * thinning();
  const auto cases = testing_parallel::prepared_cases(every, static_cast<std::size_t>(ranks) % every);
  expect_on_ranks(ranks, [&](const auto& world) { return testing_parallel::check_strategies(world, cases); });
}

TEST_P(RankCount, UnequalSharesAndRanksThatCarryNothing) {
  const int ranks = GetParam();
  const auto cases = testing_parallel::prepared_cases(13 * thinning(), 3);
  const std::vector<double> weights = testing_parallel::uneven_weights(ranks);
  expect_on_ranks(ranks, [&](const auto& world) { return testing_parallel::check_strategies(world, cases, weights); });
}

// Two nodes whose ranks are not next to each other.
TEST_P(RankCount, RanksOfANodeNeedNotBeNeighbours) {
  const int ranks = GetParam();
  const auto cases = testing_parallel::prepared_cases(17 * thinning(), 5);
  RankOptions options;
  for (int r = 0; r < ranks; ++r) options.nodes.push_back(r % 2);
  expect_on_ranks(
      ranks, [&](const auto& world) { return testing_parallel::check_strategies(world, cases); }, options);
}

TEST_P(RankCount, BytesSentAreThoseOfTheFormulas) {
  const int ranks = GetParam();
  const std::vector<double> weights = testing_parallel::uneven_weights(ranks);
  for (const int nodes : {1, 2, 3}) {
    if (thinning() > 1 && nodes != 1 + ranks % 3) continue;
    RankOptions options;
    for (int r = 0; r < ranks; ++r) options.nodes.push_back(r * nodes / ranks);
    expect_on_ranks(
        ranks, [&](const auto& world) { return testing_parallel::check_bytes(world); }, options);
    expect_on_ranks(
        ranks, [&](const auto& world) { return testing_parallel::check_bytes(world, weights); }, options);
  }
}

TEST(Prefill, OfOneRankIsWithinItsBound) {
  const std::vector<kernels::Case> cases = testing_parallel::prefill_cases();
  for (std::size_t i = 0; i < cases.size(); i += thinning()) {
    EXPECT_LE(testing_parallel::PreparedPrefill(cases[i]).error(), 1) << cases[i].name;
  }
}

// The bits of one rank, judged above.
TEST_P(RankCount, PrefillByRingAndByCollecting) {
  const int ranks = GetParam();
  const std::vector<double> weights = testing_parallel::uneven_weights(ranks);
  const std::vector<kernels::Case> cases = testing_parallel::prefill_cases();
  for (std::size_t i = 0; i < cases.size(); ++i) {  // thinned: one of the few, another on other numbers of ranks
    if (thinning() > 1 && i != static_cast<std::size_t>(ranks) % cases.size()) continue;
    const kernels::Case& shape = cases[i];
    const testing_parallel::PreparedPrefill prefill(shape);
    expect_on_ranks(ranks, [&](const auto& world) { return testing_parallel::check_prefill(world, prefill); });
    expect_on_ranks(ranks, [&](const auto& world) { return testing_parallel::check_prefill(world, prefill, weights); });
  }
}

// Each rank its heads; all of them together are the whole.
TEST_P(RankCount, ResultByHeads) {
  const int ranks = GetParam();
  const auto cases = testing_parallel::prepared_cases(11 * thinning(), 1);
  expect_on_ranks(ranks, [&](const std::shared_ptr<Communicator>& world) {
    Failures failures;
    ThreadPool pool(1);
    for (const auto& prepared : cases) {
      const kernels::Case& shape = prepared->data.shape();
      KvCache cache(world, prepared->config());
      const auto ids = prepared->fill(cache);
      const std::int64_t first = shape.heads * world->rank() / ranks, last = shape.heads * (world->rank() + 1) / ranks;
      const auto queries = static_cast<std::size_t>(shape.batch * shape.queries);
      const auto heads = static_cast<std::size_t>(last - first), v_dim = static_cast<std::size_t>(shape.v_dim);
      Output got{std::vector<float>(queries * heads * v_dim), std::vector<float>(queries * heads)}, want;
      ParallelAttention attention(world, {Strategy::kMerge});
      attention.decode(cache, 0, ids, prepared->data.input().q, prepared->data.options(), got.out, got.lse, pool,
                       Result::kByHeads, shape.first_query);
      for (std::size_t i = 0; i < queries; ++i) {
        for (std::int64_t h = first; h < last; ++h) {
          const std::size_t row = i * static_cast<std::size_t>(shape.heads) + static_cast<std::size_t>(h);
          want.lse.push_back(prepared->single.lse[row]);
          const float* out = prepared->single.out.data() + row * v_dim;
          want.out.insert(want.out.end(), out, out + v_dim);
        }
      }
      if (!got.same_bits_as(want)) failures.push_back(shape.name + ": other bits");
    }
    return failures;
  });
}

// Every step has the same bits on any number of ranks, through rebalancing, saving and loading.
TEST_P(RankCount, DecodeLoopThroughRebalanceSaveAndLoad) {
  const int ranks = GetParam();
  const Loop loop;
  const auto want = loop.undisturbed();
  const TemporaryDirectory directory;
  constexpr std::int64_t kRebalanceAt = 15, kSaveAt = 30;
  std::atomic<int> wrong = 0;
  const auto check = [&](const std::vector<float>& got, std::int64_t step) {
    const std::span<const float> expected = want[static_cast<std::size_t>(step)];
    if (!testing_parallel::same_bits(std::span<const float>(got), expected)) ++wrong;
  };
  run_ranks(ranks, [&](std::shared_ptr<Communicator> world) {
    ThreadPool pool(1);
    KvCache cache(world, loop.config());
    ParallelAttention attention(world, {Strategy::kMerge});
    const SequenceId id = cache.add_sequence();
    loop.append(cache, id, 0, Loop::kPrompt);
    for (std::int64_t step = 0; step < kSaveAt; ++step) {
      if (step == kRebalanceAt) cache.rebalance(testing_parallel::uneven_weights(ranks));
      loop.append(cache, id, Loop::kPrompt + step, 1);
      check(loop.decode(attention, cache, id, step, pool), step);
    }
    cache.save(directory.path());
  });
  const int others = ranks == 3 ? 5 : 3;
  run_ranks(others, [&](std::shared_ptr<Communicator> world) {
    ThreadPool pool(2);
    KvCache cache = KvCache::load(world, directory.path());
    ParallelAttention attention(world, {Strategy::kGather});
    const SequenceId id = cache.sequences().front();
    for (std::int64_t step = kSaveAt; step < Loop::kSteps; ++step) {
      loop.append(cache, id, Loop::kPrompt + step, 1);
      check(loop.decode(attention, cache, id, step, pool), step);
    }
  });
  EXPECT_EQ(wrong, 0);
}

// A rank is lost in the middle; the others go on without it, get only its branches again, and the bits do not change.
TEST(LostRank, SurvivorsGoOnWithTheSameBits) {
  const Loop loop;
  const auto want = loop.undisturbed();
  constexpr std::int64_t kLostAt = 20;
  for (const auto& [ranks, strategy] : {std::pair{2, Strategy::kMerge},
                                        {3, Strategy::kMerge},
                                        {5, Strategy::kMerge},
                                        {8, Strategy::kMerge},
                                        {3, Strategy::kRing}}) {
    for (const int lost : {0, ranks - 1}) {
      std::atomic<int> wrong = 0, recovered = 0;
      RankOptions options;
      options.deadline = Seconds(20.0);
      run_ranks(
          ranks,
          [&](std::shared_ptr<Communicator> world) {
            ThreadPool pool(1);
            KvCache cache(world, loop.config());
            auto attention = std::make_unique<ParallelAttention>(world, ParallelOptions{strategy});
            const SequenceId id = cache.add_sequence();
            loop.append(cache, id, 0, Loop::kPrompt);
            for (std::int64_t step = 0; step < Loop::kSteps; ++step) {
              if (step == kLostAt && world->size() == ranks && world->rank() == lost) return;
              if (cache.length(id) == Loop::kPrompt + step) loop.append(cache, id, Loop::kPrompt + step, 1);
              try {
                const std::vector<float> out = loop.decode(*attention, cache, id, step, pool);
                const std::span<const float> expected = want[static_cast<std::size_t>(step)];
                if (!testing_parallel::same_bits(std::span<const float>(out), expected)) ++wrong;
              } catch (const LostRanks& error) {
                if (error.ranks() != std::vector<int>{lost}) ++wrong;
                // Messages of the call may still write to what it worked with.
                if (cache.store().workspace_bytes() != 0) ++wrong;
                world = world->shrink();
                for (const TokenRange& range : cache.adopt(world)) loop.write(cache, range);
                attention = std::make_unique<ParallelAttention>(world, ParallelOptions{strategy});
                step = Loop::last_step(cache, id) - 1;
                ++recovered;
              }
            }
          },
          options);
      EXPECT_EQ(wrong, 0) << "rank " << lost << " of " << ranks;
      EXPECT_EQ(recovered, ranks - 1) << "rank " << lost << " of " << ranks;
    }
  }
}

// kAuto picks one that promises the same bits, and says why.
TEST(Auto, ChoosesWithTheSameBitsAndSaysWhy) {
  const auto cases = testing_parallel::prepared_cases(29 * thinning());
  for (const int ranks : {1, 2, 5}) {
    expect_on_ranks(ranks, [&](const std::shared_ptr<Communicator>& world) {
      Failures failures;
      ThreadPool pool(1);
      for (const auto& prepared : cases) {
        KvCache cache(world, prepared->config());
        const auto ids = prepared->fill(cache);
        ParallelAttention attention(world);
        const std::uint64_t before = world->traffic().bytes;
        const Output got = prepared->decode(attention, cache, ids, pool);
        if (!got.same_bits_as(prepared->single)) failures.push_back(prepared->data.shape().name + ": other bits");
        // What is sent to compare the ranks is a few bytes; to measure their links it is megabytes, and not counted.
        const std::uint64_t sent = world->traffic().bytes - before;
        if (sent > attention.report().traffic.bytes + 4096) failures.push_back("measuring counts as traffic");
        if (ranks > 1 && attention.why().find("chosen") == std::string::npos) failures.push_back("no reason given");
      }
      return failures;
    });
  }
}

kernels::Case small_case() {
  kernels::Case shape;
  shape.name = "small";
  return shape;
}

// What was measured for one cache holds while another, shared in another way, takes turns with it: times are never the
// same twice.
TEST(Auto, MeasuresOnceForEveryCache) {
  const PreparedCase prepared(small_case(), 5);
  expect_on_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
    ThreadPool pool(1);
    KvCache even(world, prepared.config());
    KvCache uneven(world, prepared.config(), std::vector<double>{3, 1});
    const auto ids = prepared.fill(even);
    prepared.fill(uneven);
    ParallelAttention attention(world);
    const auto reason = [&](const KvCache& cache) {
      prepared.decode(attention, cache, ids, pool);
      return attention.why();
    };
    const std::string first = reason(even);
    const std::string other = reason(uneven);
    Failures failures;
    if (reason(even) != first || reason(uneven) != other) failures.push_back("measured again");
    return failures;
  });
}

// By heads there is one way only.
TEST(Auto, MeasuresNothingForAResultByHeads) {
  const PreparedCase prepared(small_case(), 5);
  expect_on_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
    ThreadPool pool(1);
    KvCache cache(world, prepared.config());
    const auto ids = prepared.fill(cache);
    ParallelAttention attention(world);
    std::vector<float> out(prepared.single.out.size() / 2);  // an even number of heads on two ranks
    attention.decode(cache, 0, ids, prepared.data.input().q, {}, out, {}, pool, Result::kByHeads);
    return attention.why().empty() ? Failures{} : Failures{attention.why()};
  });
}

// A rank that throws in the middle of a call is gone for the others: what it leaves behind is not taken for what it had
// still to send. Rows of K are too long to be copied when they are sent, and their scales are not.
TEST(Loss, ARankThatThrowsInTheMiddleOfACallIsGone) {
  std::atomic<bool> thrown{false};
  run_ranks(2, [&](std::shared_ptr<Communicator> world) {
    ThreadPool pool(1);
    KvCacheConfig config{.kv_heads = 4, .k_dim = 128, .v_dim = 128, .k_type = DType::kInt8, .v_type = DType::kInt8};
    config.order.branches = 2;
    KvCache cache(world, config);
    const SequenceId id = cache.add_sequence();
    cache.extend(id, 512);
    const std::vector<float> rows(512 * 4 * 128, 1.0f);
    const KvView view = KvView::tokens_first(rows.data(), DType::kFloat32, 1, 512, 4, 128);
    cache.write(id, 0, 0, view, view);
    ParallelAttention attention(world);
    const std::int64_t tokens = cache.carried_tokens(id);
    std::vector<float> out(static_cast<std::size_t>(tokens) * 4 * 128);
    const auto prefill = [&] {
      const QueryView q = QueryView::dense(rows.data(), DType::kFloat32, 1, tokens, 4, 128);
      attention.prefill(cache, 0, id, 0, 512, q, {}, out, {}, pool);
    };
    prefill();
    if (world->rank() == 0) {
      // The pool is busy with this very body, which is found out when the messages are under way.
      EXPECT_THROW(pool.run(1, [&](std::size_t, int) { prefill(); }), Error);
      thrown = true;
      return;
    }
    while (!thrown) std::this_thread::yield();
    EXPECT_THROW(prefill(), LostRanks);
  });
}

// A message that the caller has sent and not received yet, as long as one of the call, is none of the call's.
TEST(Messages, OfTheCallerMayBeUnderWayDuringACall) {
  const PreparedCase prepared(small_case(), 7);
  expect_on_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
    Failures failures;
    ThreadPool pool(1);
    KvCache cache(world, prepared.config());
    const auto ids = prepared.fill(cache);
    const int other = 1 - world->rank();
    const auto with_a_message = [&](std::string_view name, const std::function<void()>& call) {
      const std::vector<float> message(prepared.single.lse.size() * state_floats(cache.config().v_dim), 7.0f);
      std::vector<float> came(message.size());
      Request sent = world->send(other, std::as_bytes(std::span(message)));
      call();
      Request received = world->receive(other, std::as_writable_bytes(std::span(came)));
      world->wait(received);
      world->wait(sent);
      if (came != message) failures.push_back(fmt::format("{} took the message", name));
    };
    for (const Strategy strategy : {Strategy::kAuto, Strategy::kMerge, Strategy::kGather, Strategy::kRing}) {
      ParallelAttention attention(world, {strategy});
      with_a_message(strategy_name(strategy), [&] {
        const Output got = prepared.decode(attention, cache, ids, pool);
        if (!got.same_bits_as(prepared.single)) failures.push_back("other bits");
      });
    }
    with_a_message("by heads", [&] {
      std::vector<float> out(prepared.single.out.size() / 2);  // an even number of heads on two ranks
      ParallelAttention(world, {Strategy::kMerge})
          .decode(cache, 0, ids, prepared.data.input().q, {}, out, {}, pool, Result::kByHeads);
    });
    with_a_message("rebalance", [&] { cache.rebalance(std::vector<double>{0, 1}); });
    return failures;
  });
}

// A failure where call() is taken, or refused without naming that.
void expect_refused(Failures& failures, const std::string& named, const std::function<void()>& call) {
  try {
    call();
    failures.push_back(named + " accepted");
  } catch (const InvalidArgument& error) {
    if (std::string(error.what()).find(named) == std::string::npos) failures.push_back(error.what());
  }
}

// Wrong arguments are refused on every rank before anything is sent, and the next call works.
TEST(BadCalls, AreRefusedOnEveryRankAndLeaveNothingBehind) {
  const PreparedCase prepared(small_case(), 3);
  expect_on_ranks(3, [&](const std::shared_ptr<Communicator>& world) {
    Failures failures;
    ThreadPool pool(1);
    KvCache cache(world, prepared.config());
    const auto ids = prepared.fill(cache);
    ParallelAttention attention(world, {Strategy::kMerge});
    const auto refused = [&](const std::string& named, const std::function<void()>& call) {
      expect_refused(failures, named, call);
    };
    Output got = prepared.empty_output();
    const QueryView q = prepared.data.input().q;
    const auto decode = [&](const QueryView& queries, int layer, std::span<float> out, AttentionOptions options = {}) {
      attention.decode(cache, layer, ids, queries, options, out, got.lse, pool);
    };
    refused("layer = 1", [&] { decode(q, 1, got.out); });
    refused("out holds 3", [&] { decode(q, 0, std::span(got.out).first(3)); });
    refused("out = 0x0", [&] { decode(q, 0, {static_cast<float*>(nullptr), got.out.size()}); });
    QueryView other = q;
    other.heads = 3;
    refused("q.heads = 3", [&] { decode(other, 0, got.out); });
    other = q;
    other.head_dim = 32;
    refused("q.head_dim = 32", [&] { decode(other, 0, got.out); });
    other = q;
    other.batch = 2;
    refused("q.batch = 2", [&] { decode(other, 0, got.out); });
    other = q;
    other.queries = -1;
    refused("q.queries = -1", [&] { decode(other, 0, got.out); });
    refused("sequences = 0x0", [&] {
      const std::span<const SequenceId> nowhere(static_cast<const SequenceId*>(nullptr), ids.size());
      attention.decode(cache, 0, nowhere, q, {}, got.out, got.lse, pool);
    });
    refused("result = 9",
            [&] { attention.decode(cache, 0, ids, q, {}, got.out, got.lse, pool, static_cast<Result>(9)); });
    refused("out = null", [&] { attention.decode_on_device(cache, 0, ids, q, {}, nullptr, nullptr, pool); });
    AttentionOptions options;
    options.window = -1;
    refused("window = -1", [&] { decode(q, 0, got.out, options); });
    if (!prepared.decode(attention, cache, ids, pool).same_bits_as(prepared.single)) failures.push_back("other bits");
    return failures;
  });
}

// The ranks that have no query to compute with would otherwise wait for those who refuse.
TEST(BadCalls, APrefillIsRefusedAlsoWhereThereAreNoQueries) {
  const PreparedCase prepared(small_case(), 3);
  expect_on_ranks(3, [&](const std::shared_ptr<Communicator>& world) {
    Failures failures;
    ThreadPool pool(1);
    KvCache cache(world, prepared.config());
    const SequenceId id = cache.add_sequence();
    cache.extend(id, 1);
    ParallelAttention attention(world);
    const QueryView whole = prepared.data.input().q;
    const std::int64_t tokens = cache.carried_tokens(id);
    const std::vector<float> rows(static_cast<std::size_t>(whole.heads * whole.head_dim));
    std::vector<float> out(static_cast<std::size_t>(tokens * whole.heads * cache.config().v_dim));
    using Change = std::function<void(QueryView&, AttentionOptions&)>;
    const auto prefill = [&](const Change& change) {
      QueryView q =
          QueryView::dense(tokens > 0 ? rows.data() : nullptr, DType::kFloat32, 1, tokens, whole.heads, whole.head_dim);
      AttentionOptions options;
      change(q, options);
      attention.prefill(cache, 0, id, 0, 1, q, options, out, {}, pool);
    };
    const auto refused = [&](const std::string& named, const Change& change) {
      expect_refused(failures, named, [&] { prefill(change); });
      prefill([](QueryView&, AttentionOptions&) {});  // and the ranks are in step
    };
    refused("q.dtype = int8", [](QueryView& q, AttentionOptions&) { q.dtype = DType::kInt8; });
    refused("q.head_stride = 0", [](QueryView& q, AttentionOptions&) { q.head_stride = 0; });
    refused("window = -1", [](QueryView&, AttentionOptions& options) { options.window = -1; });
    return failures;
  });
}

TEST(BadCalls, AStrategyThatDoesNotExistIsRefused) {
  EXPECT_THROW(ParallelAttention(self_communicator(), {.strategy = static_cast<Strategy>(99)}), InvalidArgument);
  EXPECT_THROW(ParallelAttention(self_communicator(), {.link = static_cast<DeviceLink>(99)}), InvalidArgument);
}

// What would otherwise be another result, or no result, on a rank that was started in another way.
TEST(BadCalls, RanksThatDifferAreToldSo) {
  const PreparedCase prepared(small_case(), 3);
  expect_on_ranks(3, [&](const std::shared_ptr<Communicator>& world) {
    Failures failures;
    ThreadPool pool(1);
    const bool other = world->rank() == 1;
    const auto refused = [&](const std::string& named, ParallelOptions options, KvCache& cache) {
      const auto ids = prepared.fill(cache);
      if (other && named == "sequences or types") cache.add_sequence();
      ParallelAttention attention(world, options);
      try {
        prepared.decode(attention, cache, ids, pool);
        failures.push_back("other " + named + " accepted");
      } catch (const InvalidArgument& error) {
        const std::string expected = "rank 1 has other " + named + " than rank 0";
        if (std::string(error.what()).find(expected) == std::string::npos) failures.push_back(error.what());
      }
    };
    for (const bool canonical : {true, false}) {
      KvCache plain(world, prepared.config());
      refused("ParallelOptions", {other ? Strategy::kPaper : Strategy::kTwoPhase, canonical}, plain);
      KvCache longer(world, prepared.config());
      refused("sequences or types", {Strategy::kPaper, canonical}, longer);
      KvCache weighted(world, prepared.config(), std::vector<double>{1, other ? 2.0 : 1.0, 1});
      refused("weights", {Strategy::kPaper, canonical}, weighted);
    }
    return failures;
  });
}

}  // namespace
}  // namespace treeattn
