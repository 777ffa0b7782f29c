// SPDX-License-Identifier: Apache-2.0
// The sharded KV cache over ranks that are threads: content against the mirror through everything that moves it, the
// share of memory each rank has, and what is left when a rank is lost.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <functional>
#include <numeric>

#include "base/checksum.h"
#include "kv_mirror.h"
#include "parallel/agree.h"
#include "parallel/kv_format.h"
#include "resident_bytes.h"
#include "thinning.h"
#include "treeattn/error.h"
#include "treeattn/parallel_attention.h"

namespace treeattn {
namespace {

using namespace testing_kv;

std::vector<double> random_weights(Random& random, int ranks) {
  std::vector<double> weights;
  for (int rank = 0; rank < ranks; ++rank) weights.push_back(random.chance(0.3) ? 0.0 : std::fabs(random.value()));
  weights[static_cast<std::size_t>(random.integer(0, ranks - 1))] = 1.0;
  return random.chance(0.3) ? std::vector<double>{} : weights;
}

std::int64_t sum_over_ranks(Communicator& communicator, std::int64_t mine) {
  std::vector<std::int64_t> all(static_cast<std::size_t>(communicator.size()));
  communicator.allgather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
  return std::accumulate(all.begin(), all.end(), std::int64_t{0});
}

TEST(KvCacheRanks, RandomCallsKeepTheContent) {
  const std::uint64_t seed = test_seed();
  std::uint64_t round = 0;
  for (const int ranks : {1, 2, 3, 5, 8}) {
    for (std::size_t repeat = 0; repeat < std::max<std::size_t>(1, 6 / thinning()); ++repeat, ++round) {
      SCOPED_TRACE(seed + round);
      const TemporaryDirectory directory;
      run_ranks(ranks, [&](std::shared_ptr<Communicator> world) {
        Random random(seed + round);
        const KvCacheConfig config = random_config(random);
        Pair pair(world, config, random_weights(random, ranks));
        for (int step = 0; step < 40; ++step) {
          if (random.chance(0.1)) {
            pair.cache.rebalance(random_weights(random, ranks));
          } else if (random.chance(0.05)) {
            pair.cache.save(directory.path());
            pair.cache = KvCache::load(world, directory.path(), random_weights(random, ranks));
          } else {
            pair.step(random, 700);
          }
          if (step % 8 == 7) pair.check();
        }
        pair.check();
        for (const SequenceId id : pair.mirror.ids()) {
          EXPECT_EQ(sum_over_ranks(*world, pair.cache.carried_tokens(id)), pair.cache.length(id));
          pair.drop(id);
        }
        EXPECT_EQ(pair.cache.allocated_bytes(), 0u);
      });
      if (HasFailure()) FAIL() << "TREEATTN_SEED=" << seed + round << ", " << ranks << " ranks";
    }
  }
}

TEST(KvCacheRanks, ForksStaySharedOnTheirWay) {
  run_ranks(3, [](std::shared_ptr<Communicator> world) {
    Random random(5);
    KvCacheConfig config = random_config(random);
    config.order = {.chunk_tokens = 64, .branches = 16};
    Pair pair(world, config);
    const SequenceId a = pair.add();
    pair.grow(random, a, 64 * 40 + 1);
    pair.fork(a);
    const SequenceId c = pair.fork(a);
    pair.grow(random, c, 100);
    const auto all = [&] { return sum_over_ranks(*world, static_cast<std::int64_t>(pair.cache.allocated_bytes())); };
    const std::int64_t before = all();
    const TemporaryDirectory directory;
    for (const std::vector<double>& weights : {std::vector<double>{0, 0, 1}, {1, 2, 3}, {1, 0, 0}, {}}) {
      pair.cache.rebalance(weights);
      EXPECT_EQ(all(), before);
      pair.check();
    }
    // Rank 0's directory is the one that all use.
    std::array<char, 256> name{};
    std::strncpy(name.data(), directory.path().c_str(), name.size() - 1);
    world->broadcast(std::as_writable_bytes(std::span(name)), 0);
    pair.cache.save(name.data());
    pair.cache = KvCache::load(world, name.data(), std::vector<double>{1, 1, 5});
    EXPECT_EQ(all(), before);
    pair.check();
    world->barrier();
  });
}

TEST(KvCacheRanks, EveryRankAllocatesItsShare) {
  constexpr std::int64_t kTokens = 200'000;
  for (const int ranks : {1, 2, 3, 4, 5, 6, 7, 8, 16}) {
    std::atomic<double> worst{0};
    run_ranks(ranks, [&](std::shared_ptr<Communicator> world) {
      KvCache cache(world, {.layers = 2, .kv_heads = 1, .k_dim = 16, .v_dim = 16, .order = {}});
      cache.extend(cache.add_sequence(), kTokens);
      const double share = static_cast<double>(kTokens) / ranks * 2 * (16 + 16) * 2;
      const double excess = static_cast<double>(cache.allocated_bytes()) / share - 1;
      double seen = worst.load();
      while (std::fabs(excess) > seen && !worst.compare_exchange_weak(seen, std::fabs(excess))) {
      }
    });
    std::printf("%2d ranks: furthest from its share %.2f %%\n", ranks, 100 * worst.load());
    EXPECT_LT(worst.load(), 0.05) << ranks << " ranks";
  }
}

TEST(KvCacheRanks, MemoryFollowsTheShares) {
  constexpr std::int64_t kTokens = 1 << 17;
  const std::vector<float> k(kTokens * 64, 1.0f), v(kTokens * 64, 1.0f);
  run_ranks(4, [&](std::shared_ptr<Communicator> world) {
    KvCache cache(world, {.kv_heads = 1,
                          .k_dim = 64,
                          .v_dim = 64,
                          .k_type = DType::kFloat32,
                          .v_type = DType::kFloat32,
                          .order = {.chunk_tokens = 128, .branches = 64}});
    const SequenceId id = cache.add_sequence();
    cache.append(id, KvView::tokens_first(k.data(), DType::kFloat32, 1, kTokens, 1, 64),
                 KvView::tokens_first(v.data(), DType::kFloat32, 1, kTokens, 1, 64));
    const std::size_t whole = std::size_t{kTokens} * 64 * 2 * 4;
    EXPECT_EQ(cache.allocated_bytes(), whole / 4);
    world->barrier();
    const std::size_t before = resident_bytes();
    world->barrier();
    cache.rebalance(std::vector<double>{0, 0, 0, 1});
    EXPECT_EQ(cache.allocated_bytes(), world->rank() == 3 ? whole : 0);
    world->barrier();
    const std::size_t moved = resident_bytes();
    world->barrier();
    cache.drop(id);
    world->barrier();
    const std::size_t dropped = resident_bytes();
    world->barrier();
    if (world->rank() != 0) return;
    std::printf("whole %zu MiB; resident before %zu, after the move %zu, after the drop %zu MiB\n", whole >> 20,
                before >> 20, moved >> 20, dropped >> 20);
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)  // shadow memory and quarantine count too
    EXPECT_LT(moved, before + whole / 4);
    EXPECT_LT(dropped + whole / 2, moved);
#endif
  });
}

TEST(KvCacheRanks, RanksThatDifferAreToldSo) {
  run_ranks(3, [](std::shared_ptr<Communicator> world) {
    Random random(1);
    Pair pair(world, random_config(random));
    const SequenceId id = pair.add();
    pair.cache.extend(id, world->rank() == 1 ? 100 : 101);
    EXPECT_THROW(pair.cache.rebalance({}), InvalidArgument);
    EXPECT_THROW(pair.cache.save("/tmp/never"), InvalidArgument);
    if (world->rank() == 1) pair.cache.extend(id, 1);
    std::vector<double> weights = {1, 2, 3};
    weights[0] = 10.0 * world->rank();
    EXPECT_THROW(pair.cache.rebalance(weights), InvalidArgument);
    EXPECT_THROW(pair.cache.rebalance(std::vector<double>{0, 0, 0}), InvalidArgument);
    EXPECT_THROW(pair.cache.rebalance(std::vector<double>{1, 1}), InvalidArgument);
    pair.cache.rebalance({});
  });
}

// Runs until a rank is found missing, and goes on without it.
std::shared_ptr<Communicator> without_the_lost(Communicator& world, const std::function<void()>& body) {
  try {
    body();
  } catch (const LostRanks&) {
    return world.shrink();
  }
  ADD_FAILURE() << "no rank was missed";
  return nullptr;
}

// Also for tokens that it does not carry: or one rank would have grown and another not.
TEST(KvCacheRanks, EveryRankRefusesAWrongPage) {
  std::vector<float> rows(2 * 64 * 2 * 16);
  const std::int32_t table[] = {1, 99};
  run_ranks(2, [&](std::shared_ptr<Communicator> world) {
    KvCache cache(world, {.kv_heads = 2, .k_dim = 16, .v_dim = 16, .order = {64, 4}});
    const SequenceId id = cache.add_sequence();
    const KvView view = KvView::paged(rows.data(), DType::kFloat32, 2, 64, 2, 16, 1, 2, table);
    EXPECT_EQ(cache.carried(id, 0, 0).size(), 0u);
    EXPECT_THROW(cache.append(id, view, view), InvalidArgument) << "rank " << world->rank();
    EXPECT_EQ(cache.length(id), 0) << "rank " << world->rank();
  });
}

// One length for all, before anything is added up that is not the same text.
TEST(KvCacheRanks, ARankThatHasRefusedTokensAsksForOneLength) {
  run_ranks(2, [](std::shared_ptr<Communicator> world) {
    constexpr std::int64_t kHeads = 1024, kDim = 256;
    const KvCacheConfig config = {.layers = 1,
                                  .kv_heads = kHeads,
                                  .k_dim = kDim,
                                  .v_dim = kDim,
                                  .k_type = DType::kFloat32,
                                  .v_type = DType::kFloat32,
                                  .order = {.chunk_tokens = 64, .branches = 4}};
    const std::vector<double> weights = {1, 0};
    KvCache cache(world, config, weights);
    const SequenceId id = cache.add_sequence();
    const std::vector<float> rows(3 * kHeads * kDim, 0.5f);
    const KvView view = KvView::tokens_first(rows.data(), DType::kFloat32, 1, 3, kHeads, kDim);
    cache.append(id, view, view);
    ParallelAttention attention(world);
    ThreadPool pool(1);
    std::vector<float> out(kHeads * kDim);
    const QueryView q = QueryView::dense(rows.data(), DType::kFloat32, 1, 1, kHeads, kDim);
    const auto decode = [&] { attention.decode(cache, 0, {&id, 1}, q, {}, out, {}, pool); };
    const std::int64_t petabyte = 64 * (std::int64_t{8} << 20);
    if (world->rank() == 0) {
      EXPECT_THROW(cache.extend(id, petabyte), Error);
      EXPECT_THROW(decode(), Error);
      EXPECT_THROW(attention.prefill(cache, 0, id, 2, 1, q, {}, out, {}, pool), Error);
    } else {
      cache.extend(id, petabyte);
    }
    cache.truncate(id, 3);
    decode();
    EXPECT_EQ(out.front(), 0.5f);
  });
}

TEST(KvCacheRanks, GoesOnWithoutALostRank) {
  const std::uint64_t seed = test_seed();
  for (int round = 0; round < 24 / static_cast<int>(thinning()); ++round) {
    const int ranks = 2 + round % 5;
    std::atomic<std::int64_t> lost_tokens{0};
    SCOPED_TRACE(seed + static_cast<std::uint64_t>(round));
    run_ranks(ranks, [&](std::shared_ptr<Communicator> world) {
      Random random(seed + static_cast<std::uint64_t>(round));
      const KvCacheConfig config = random_config(random);
      Pair pair(world, config, random_weights(random, ranks));
      for (int step = 0; step < 20; ++step) pair.step(random, 1000);
      if (pair.mirror.ids().empty()) pair.grow(random, pair.add(), 2000);
      const auto lost = static_cast<int>(random.integer(0, ranks - 1));
      if (world->rank() == lost) {
        for (const SequenceId id : pair.mirror.ids()) lost_tokens += pair.cache.carried_tokens(id);
        return;
      }
      auto survivors = without_the_lost(*world, [&] { world->barrier(); });
      ASSERT_EQ(survivors->size(), ranks - 1);
      const std::vector<TokenRange> missing = pair.cache.adopt(survivors, random_weights(random, ranks - 1));
      EXPECT_EQ(pair.cache.communicator(), survivors);
      std::int64_t count = 0;
      for (const TokenRange& range : missing) {
        count += range.count;
        EXPECT_EQ(pair.cache.carried(range.sequence, range.first, range.count), std::vector<TokenRange>{range});
      }
      EXPECT_EQ(sum_over_ranks(*survivors, count), lost_tokens.load());
      Random own(seed);  // the ranks write different things from here on
      pair.refill(own, missing);
      pair.check();
      for (int step = 0; step < 5; ++step) pair.step(random, 1000);
      pair.cache.rebalance(random_weights(random, ranks - 1));
      pair.check();
    });
  }
}

// Survivors that do not agree on the weights are told so, and can agree and adopt again: until then nothing has
// changed.
TEST(KvCacheRanks, RefusesToBeAdoptedByOtherWeightsOnEachRank) {
  const std::uint64_t seed = test_seed();
  run_ranks(3, [&](std::shared_ptr<Communicator> world) {
    Random random(seed);
    Pair pair(world, random_config(random));
    pair.grow(random, pair.add(), 2000);
    if (world->rank() == 1) return;
    auto survivors = without_the_lost(*world, [&] { world->barrier(); });
    ASSERT_EQ(survivors->size(), 2);
    const std::vector<int> before(pair.cache.rank_of_leaf().begin(), pair.cache.rank_of_leaf().end());
    std::vector<double> all_to_me(2, 0.0);
    all_to_me[static_cast<std::size_t>(survivors->rank())] = 1.0;
    EXPECT_THROW(pair.cache.adopt(survivors, all_to_me), InvalidArgument);
    EXPECT_EQ(pair.cache.communicator(), world);
    EXPECT_TRUE(std::ranges::equal(pair.cache.rank_of_leaf(), before));
    Random own(seed);  // the ranks write different things from here on
    pair.refill(own, pair.cache.adopt(survivors));
    pair.check();
  });
}

// Survivors of which one has added a sequence more, in a cache that has had very many: only those that are there count,
// and what one of them has called a sequence no other is called later.
TEST(KvCacheRanks, AdoptsTheSequencesThatAllHave) {
  constexpr SequenceId kHadBefore = SequenceId{1} << 40;
  run_ranks(3, [&](std::shared_ptr<Communicator> world) {
    const KvCacheConfig config{.kv_heads = 1, .k_dim = 64, .v_dim = 64};
    parallel::KvStore store(world, config, parallel::make_shares(*world, config, {}));
    store.restore_next(kHadBefore);
    const SequenceId both = store.add_sequence(), first_only = store.add_sequence(), last_only = store.add_sequence();
    EXPECT_EQ(both, kHadBefore);
    store.extend(both, 300 + world->rank());
    store.extend(first_only, 10);
    store.extend(last_only, 10);
    store.drop(world->rank() == 0 ? last_only : first_only);
    if (world->rank() == 1) return;
    auto survivors = without_the_lost(*world, [&] { world->barrier(); });
    const SequenceId ahead = kHadBefore + 3;
    if (survivors->rank() == 1) {
      EXPECT_EQ(store.add_sequence(), ahead);
    }
    store.adopt(survivors, parallel::make_shares(*survivors, config, {}));
    EXPECT_EQ(store.sequences(), std::vector<SequenceId>{both});
    EXPECT_EQ(store.length(both), 300);
    EXPECT_EQ(store.add_sequence(), ahead + 1);
  });
}

// A rank goes while leaves are on the move: the survivors keep every leaf that it did not carry or was not being given.
TEST(KvCacheRanks, GoesOnAfterARebalanceWasCutOff) {
  const std::uint64_t seed = test_seed();
  for (int round = 0; round < 12 / static_cast<int>(thinning()); ++round) {
    constexpr int kRanks = 4;
    SCOPED_TRACE(seed + static_cast<std::uint64_t>(round));
    const int lost = round % kRanks;
    run_ranks(kRanks, [&](std::shared_ptr<Communicator> world) {
      Random random(seed + static_cast<std::uint64_t>(round));
      KvCacheConfig config = random_config(random);
      config.order = {.chunk_tokens = 64, .branches = 32};
      Pair pair(world, config, std::vector<double>{1, 1, 1, 1});
      for (int step = 0; step < 20; ++step) pair.step(random, 1000);
      if (pair.mirror.ids().empty()) pair.grow(random, pair.add(), 3000);
      const std::vector<double> weights = {3, 1, 1, 3};
      if (world->rank() == lost) {
        // Takes part until the others know what to move, then is gone.
        const parallel::KvStore& store = pair.cache.store();
        const plan::Shares shares = parallel::make_shares(*world, config, weights);
        const auto leaves = std::as_bytes(std::span(shares.rank_of_leaf()));
        parallel::require_same(*world, base::crc32c(leaves, parallel::digest(parallel::describe(store))), "");
        std::vector<std::byte> mine(4), all(4 * kRanks);
        for (int leaf = 0; leaf < 32; ++leaf) {
          if (store.holds(leaf)) mine[static_cast<std::size_t>(leaf / 8)] |= std::byte{1} << (leaf % 8);
        }
        world->allgather(mine, all);
        return;
      }
      auto survivors = without_the_lost(*world, [&] {
        pair.cache.rebalance(weights);
        world->barrier();
      });
      ASSERT_EQ(survivors->size(), kRanks - 1);
      const std::vector<TokenRange> missing = pair.cache.adopt(survivors);
      for (const TokenRange& range : missing) {
        for (std::int64_t token = range.first; token < range.first + range.count; token += 64) {
          const int leaf = plan::leaf_of_chunk(config.order, token / 64);
          EXPECT_EQ(leaf / 8, lost) << "a leaf that a survivor had was lost";  // 8 leaves each before
        }
      }
      pair.refill(random, missing);
      pair.check();
    });
  }
}

}  // namespace
}  // namespace treeattn
