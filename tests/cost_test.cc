// SPDX-License-Identifier: Apache-2.0
// Steps, messages and bytes against closed forms and against the schedules; seconds against hand-made numbers, closed
// forms and a simulator; the paper's equations.
#include "plan/cost.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "treeattn/error.h"

namespace treeattn::plan {
namespace {

constexpr Strategy kScheduled[] = {Strategy::kMerge, Strategy::kButterfly, Strategy::kGather, Strategy::kTwoLevel};

std::uint64_t ceil_log2(int n) { return std::bit_width(static_cast<unsigned>(n - 1)); }
std::uint64_t wide(int n) { return static_cast<std::uint64_t>(n); }

// `ranks` ranks, `on_node` to a node; the interconnect of a DGX H100 cluster: one adapter per GPU.
Network cluster(int ranks, int on_node = 8) {
  Network network{.local = {2e-6, 450e9}, .remote = {4e-6, 50e9}};
  for (int rank = 0; rank < ranks; ++rank) network.node_of_rank.push_back(rank / on_node);
  network.adapters_per_node = 8;
  network.merge_bytes_per_s = 3.35e12;
  return network;
}

// One query of 16 heads of 128, K and V in bfloat16, `tokens` in all, HBM at 3.35 TB/s.
ReductionSize decode_size(int ranks, std::uint64_t tokens) {
  ReductionSize size{.rows = 16, .v_dim = 128};
  size.kv_bytes_of_rank.assign(static_cast<std::size_t>(ranks), tokens / wide(ranks) * 2 * 2048 * 2);
  size.attention_bytes_per_s = 3.35e12;
  return size;
}

Shares equal_shares(const Network& network, int branches = 256) {
  return Shares::weighted(branches, ranks_by_node(network.node_of_rank), {});
}

TEST(CostTest, BytesOfAStateAreThoseOnTheWire) { EXPECT_EQ(decode_size(1, 1).state_bytes(), 16u * (128 + 2) * 4); }

TEST(CostTest, ClosedFormsOfAPowerOfTwo) {
  for (int p = 1; p <= 256; p *= 2) {
    SCOPED_TRACE(testing::Message() << p << " ranks");
    const Network network = cluster(p);
    const Shares shares = equal_shares(network);
    const ReductionSize size = decode_size(p, 1 << 20);
    const std::uint64_t n = size.state_bytes();
    const std::uint64_t log = ceil_log2(p);
    const auto cost = [&](Strategy strategy) { return cost_of(strategy, network, shares, size); };

    for (const Strategy strategy : {Strategy::kPaper, Strategy::kTwoPhase, Strategy::kMerge, Strategy::kTwoLevel}) {
      EXPECT_EQ(cost(strategy).bytes, tree_decode_bytes(p, size)) << strategy_name(strategy);
    }
    EXPECT_EQ(tree_decode_bytes(p, size), 2 * wide(p - 1) * n);
    EXPECT_EQ(cost(Strategy::kButterfly).bytes, butterfly_decode_bytes(p, size));
    EXPECT_EQ(butterfly_decode_bytes(p, size), wide(p) * log * n);
    EXPECT_EQ(cost(Strategy::kGather).bytes, gather_decode_bytes(p, size));
    EXPECT_EQ(gather_decode_bytes(p, size), wide(p) * wide(p - 1) * n);
    EXPECT_EQ(cost(Strategy::kRing).bytes, ring_decode_bytes(size.kv_bytes_of_rank));
    EXPECT_EQ(cost(Strategy::kTwoLevel).remote_bytes, two_level_remote_bytes(std::max(1, p / 8), size));

    EXPECT_EQ(cost(Strategy::kPaper).steps, 6 * log);
    EXPECT_EQ(cost(Strategy::kTwoPhase).steps, 4 * log);
    EXPECT_EQ(cost(Strategy::kMerge).steps, 2 * log);
    EXPECT_EQ(cost(Strategy::kButterfly).steps, log);
    EXPECT_EQ(cost(Strategy::kGather).steps, log);
    EXPECT_EQ(cost(Strategy::kTwoLevel).steps, 2 * log);
    EXPECT_EQ(cost(Strategy::kRing).steps, wide(p - 1));

    EXPECT_EQ(cost(Strategy::kPaper).messages, 6 * wide(p - 1));
    EXPECT_EQ(cost(Strategy::kTwoPhase).messages, 4 * wide(p - 1));
    EXPECT_EQ(cost(Strategy::kMerge).messages, 2 * wide(p - 1));
    EXPECT_EQ(cost(Strategy::kButterfly).messages, wide(p) * log);
    EXPECT_EQ(cost(Strategy::kGather).messages, wide(p) * log);
    EXPECT_EQ(cost(Strategy::kTwoLevel).messages, 2 * wide(p - 1));
    EXPECT_EQ(cost(Strategy::kRing).messages, wide(p) * wide(p - 1));
  }
}

TEST(CostTest, ClosedFormsOfAnyNumberOfRanksInFreeOrder) {
  for (int p = 1; p <= 100; ++p) {
    SCOPED_TRACE(testing::Message() << p << " ranks");
    const Network network = cluster(p, 3);
    const Shares shares = equal_shares(network);
    const ReductionSize size = decode_size(p, 1 << 20);
    const auto bytes = [&](Strategy strategy) { return cost_of(strategy, network, shares, size, false).bytes; };
    EXPECT_EQ(bytes(Strategy::kMerge), tree_decode_bytes(p, size));
    EXPECT_EQ(bytes(Strategy::kTwoLevel), tree_decode_bytes(p, size));
    EXPECT_EQ(bytes(Strategy::kButterfly), butterfly_decode_bytes(p, size));
    EXPECT_EQ(bytes(Strategy::kGather), gather_decode_bytes(p, size));
    EXPECT_EQ(bytes(Strategy::kPaper), tree_decode_bytes(p, size));
    EXPECT_EQ(bytes(Strategy::kTwoPhase), tree_decode_bytes(p, size));
    EXPECT_EQ(cost_of(Strategy::kTwoLevel, network, shares, size, false).remote_bytes,
              two_level_remote_bytes((p + 2) / 3, size));
  }
}

// What an executor would count, message by message, on shares of every kind.
TEST(CostTest, BytesAreThoseOfTheSchedule) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 300; ++trial) {
    const int p = 1 + static_cast<int>(random() % 40);
    Network network = cluster(p);
    for (int& node : network.node_of_rank) node = static_cast<int>(random() % static_cast<unsigned>(p));
    std::vector<int> rank_of_leaf(128);
    for (int& rank : rank_of_leaf) rank = static_cast<int>(random() % static_cast<unsigned>(p));
    std::vector<double> weights(static_cast<std::size_t>(p));
    for (double& weight : weights) weight = static_cast<double>(random() % 4);
    weights.back() = 1;
    const std::vector<int> order = ranks_by_node(network.node_of_rank);
    const Shares shares = trial % 2 == 0 ? Shares(p, rank_of_leaf) : Shares::weighted(128, order, weights);
    const ReductionSize size{.rows = 6, .v_dim = 80};
    for (const Strategy strategy : kScheduled) {
      for (const bool canonical : {true, false}) {
        const Schedule schedule = make_schedule(strategy, network.node_of_rank);
        Cost want{.steps = schedule.rounds.size()};
        for (const auto& round : schedule.rounds) {
          for (const Message& message : round) {
            const std::uint64_t bytes = states_in(message, schedule, shares, canonical) * size.state_bytes();
            want.messages += bytes > 0 ? 1 : 0;
            want.bytes += bytes;
            const auto node = [&](int rank) { return network.node_of_rank[static_cast<std::size_t>(rank)]; };
            if (node(message.from) != node(message.to)) want.remote_bytes += bytes;
          }
        }
        const Cost got = cost_of(strategy, network, shares, size, canonical);
        ASSERT_EQ(got.steps, want.steps);
        ASSERT_EQ(got.messages, want.messages);
        ASSERT_EQ(got.bytes, want.bytes);
        ASSERT_EQ(got.remote_bytes, want.remote_bytes);
      }
    }
  }
}

// The canonical order sends what the free order sends and the nodes that unequal shares add. The numbers are those of
// docs/strategies.md.
TEST(CostTest, WhatUnequalSharesAdd) {
  struct Line {
    int ranks;
    std::uint64_t merge, butterfly, gather;
  };
  for (const Line& line : {Line{3, 14, 18, 32}, Line{5, 27, 43, 104}, Line{6, 31, 52, 140}, Line{8, 14, 24, 56},
                           Line{12, 61, 135, 528}, Line{100, 343, 1499, 17424}}) {
    const Network network = cluster(line.ranks);
    const ReductionSize size{.rows = 1, .v_dim = 1};
    const auto states = [&](Strategy strategy) {
      return cost_of(strategy, network, equal_shares(network), size).bytes / size.state_bytes();
    };
    EXPECT_EQ(states(Strategy::kMerge), line.merge) << line.ranks;
    EXPECT_EQ(states(Strategy::kButterfly), line.butterfly) << line.ranks;
    EXPECT_EQ(states(Strategy::kGather), line.gather) << line.ranks;
  }
}

TEST(CostTest, RanksWithoutLeavesAddStepsButNoMessages) {
  const Network network = cluster(8);
  const std::vector<double> weights = {1, 0, 0, 0, 1, 0, 0, 0};
  const Shares shares = Shares::weighted(64, ranks_by_node(network.node_of_rank), weights);
  const ReductionSize size = {.rows = 1, .v_dim = 2};
  const Cost cost = cost_of(Strategy::kMerge, network, shares, size);
  EXPECT_EQ(cost.steps, 6u);
  EXPECT_EQ(cost.messages, 1u + 7u);  // one partial result up, the result to everybody
  // An empty round takes no time: 4 messages one after the other, of 16 bytes, the first one merged.
  EXPECT_NEAR(cost.seconds, 4 * (2e-6 + 16 / 450e9) + 16 / 3.35e12, 1e-15);
}

// Numbers that can be checked in the head: 1 s of latency, 1 byte/s, states of 16 bytes.
TEST(CostTest, SecondsByHand) {
  Network network{.local = {1, 1}, .remote = {100, 1}, .node_of_rank = {0, 0, 1, 1}};
  network.merge_bytes_per_s = 16;
  const ReductionSize size{.rows = 1, .v_dim = 2, .kv_bytes_of_rank = {10, 20, 30, 40}, .attention_bytes_per_s = 10};
  const Shares shares = equal_shares(network, 4);
  const auto seconds = [&](Strategy strategy) { return cost_of(strategy, network, shares, size).seconds; };
  const double work = 4;
  // Inside the nodes 1 + 16 and a merge of 1; between them 100 + 16 and a merge; the same back without merges.
  EXPECT_DOUBLE_EQ(seconds(Strategy::kMerge), work + 18 + 117 + 116 + 17);
  EXPECT_DOUBLE_EQ(seconds(Strategy::kTwoLevel), seconds(Strategy::kMerge));
  // Two messages share the link out of each node.
  EXPECT_DOUBLE_EQ(seconds(Strategy::kButterfly), work + 18 + (100 + 32 + 1));
  // 1 > 0, 2 > 1, 3 > 2, 0 > 3, then two parts each from two places on.
  EXPECT_DOUBLE_EQ(seconds(Strategy::kGather), work + 117 + (100 + 64 + 2));
  // Maximum, numerator, denominator: 4, 8 and 4 bytes, each in 4 rounds of which 2 merge.
  const double latencies = 2 * (1 + 100);
  EXPECT_DOUBLE_EQ(seconds(Strategy::kPaper), work + 3 * latencies + 4 * (4 + 8 + 4) + 2 * (4 + 8 + 4) / 16.0);
  EXPECT_DOUBLE_EQ(seconds(Strategy::kTwoPhase), work + 2 * latencies + 4 * (4 + 12) + 2 * (4 + 12) / 16.0);
  // 1 > 2 and 3 > 0 leave a node: shares 1 and 3, then 0 and 2, then 3 and 1, and the work on the last one.
  EXPECT_DOUBLE_EQ(seconds(Strategy::kRing), 140 + 130 + 140 + work);
  // Two adapters: nothing is shared.
  network.adapters_per_node = 2;
  EXPECT_DOUBLE_EQ(seconds(Strategy::kButterfly), work + 18 + (100 + 16 + 1));
}

// In the tree by rank, 1 > 0 and 3 > 2 come into node 0 together from two nodes. On the way back 0 > 1 leaves it with
// 0 > 2, before 2 > 3.
TEST(CostTest, WhatEntersANodeSharesItsAdaptersToo) {
  Network network{.local = {1, 1}, .remote = {100, 1}, .node_of_rank = {0, 1, 0, 2}};
  network.merge_bytes_per_s = 16;
  const ReductionSize size{.rows = 1, .v_dim = 2};
  const double maximum = (100 + 8 + 0.25) + (1 + 4 + 0.25) + (1 + 4) + (100 + 4);
  const double sums = (100 + 24 + 0.75) + (1 + 12 + 0.75) + (1 + 12) + (100 + 12);
  EXPECT_DOUBLE_EQ(cost_of(Strategy::kTwoPhase, network, equal_shares(network, 4), size).seconds, maximum + sums);
}

// On the way down of an allreduce 0 > 2 and 0 > 1 leave together, and 2 > 3 follows.
TEST(CostTest, ARankThatSendsToItsChildrenAtOnceSharesItsLinkAmongThem) {
  Network network{.local = {1, 1}, .remote = {100, 1}, .node_of_rank = {0, 0, 0, 0}};
  network.merge_bytes_per_s = 16;
  const ReductionSize size{.rows = 1, .v_dim = 2};
  const double maximum = 2 * (1 + 4 + 0.25) + (1 + 2 * 4) + (1 + 4);
  const double sums = 2 * (1 + 12 + 0.75) + (1 + 2 * 12) + (1 + 12);
  EXPECT_DOUBLE_EQ(cost_of(Strategy::kTwoPhase, network, equal_shares(network, 4), size).seconds, maximum + sums);
}

// 0 > 1 stays on its node; 1 > 2 and 2 > 0 do not. First they carry shares 1 and 2, then 0 and 1.
TEST(CostTest, SharesGoRoundTheRingOneRankAStep) {
  const Network network{.local = {1, 1}, .remote = {100, 1}, .node_of_rank = {0, 0, 1}};
  const ReductionSize size{.rows = 1, .v_dim = 1, .kv_bytes_of_rank = {10, 20, 60}};
  const Cost cost = cost_of(Strategy::kRing, network, equal_shares(network, 4), size);
  EXPECT_DOUBLE_EQ(cost.seconds, 160 + 120);
  EXPECT_EQ(cost.remote_bytes, 20u + 60 + 10 + 20);
}

TEST(CostTest, ARingStepLastsAsLongAsTheWorkThatHidesIt) {
  Network network{.local = {1, 1}, .remote = {1, 1}, .node_of_rank = {0, 0, 0}};
  ReductionSize size{.rows = 1, .v_dim = 1, .kv_bytes_of_rank = {10, 0, 10}, .attention_bytes_per_s = 0.1};
  const Cost cost = cost_of(Strategy::kRing, network, equal_shares(network, 4), size);
  EXPECT_DOUBLE_EQ(cost.seconds, 3 * 100);
  EXPECT_EQ(cost.messages, 4u) << "an empty share is not sent";
  EXPECT_EQ(cost.bytes, ring_decode_bytes(size.kv_bytes_of_rank));
  EXPECT_EQ(cost.bytes, 40u);
}

// The tree of the two allreduce strategies follows the ranks, not the nodes.
TEST(CostTest, AllreducesGoInOrderOfRank) {
  Network network = cluster(4);
  network.node_of_rank = {0, 1, 0, 1};
  const ReductionSize size = decode_size(4, 1 << 20);
  const Shares shares = equal_shares(network);
  // 1 > 0 and 3 > 2 go between nodes, and back; 2 > 0 does not.
  EXPECT_EQ(cost_of(Strategy::kTwoPhase, network, shares, size).remote_bytes, 4 * size.state_bytes());
  EXPECT_EQ(cost_of(Strategy::kMerge, network, shares, size).remote_bytes, 2 * size.state_bytes());
}

TEST(CostTest, AWorseNetworkIsNeverFaster) {
  const ReductionSize size = decode_size(24, 1 << 20);
  const Network network = cluster(24);
  const Shares shares = equal_shares(network);
  for (const Strategy strategy : kAllStrategies) {
    SCOPED_TRACE(std::string(strategy_name(strategy)));
    const auto worse = [&](auto change) {
      Network changed = network;
      change(changed);
      return cost_of(strategy, changed, shares, size).seconds;
    };
    const double seconds = cost_of(strategy, network, shares, size).seconds;
    EXPECT_GE(worse([](Network& n) { n.local.latency_s *= 2; }), seconds);
    EXPECT_GT(worse([](Network& n) { n.remote.latency_s *= 2; }), seconds);
    EXPECT_GE(worse([](Network& n) { n.local.bytes_per_s /= 2; }), seconds);
    EXPECT_GT(worse([](Network& n) { n.remote.bytes_per_s /= 2; }), seconds);
    EXPECT_GE(worse([](Network& n) { n.adapters_per_node = 1; }), seconds);
    EXPECT_GE(worse([](Network& n) { n.merge_bytes_per_s /= 1000; }), seconds);
    ReductionSize more = size;
    more.rows *= 2;
    EXPECT_GE(cost_of(strategy, network, shares, more).seconds, seconds);
  }
}

// SimGrid 3.32 on the same links and memory, one fused exchange by recursive doubling: what it said, in seconds.
TEST(CostTest, AgreesWithASimulator) {
  struct Line {
    int ranks;
    std::uint64_t tokens;
    double ring, fused;
  };
  for (const Line& line :
       {Line{8, 80'000, 1.31e-3, 30.5e-6}, Line{8, 5'120'000, 83.1e-3, 1571e-6}, Line{64, 5'120'000, 826e-3, 214e-6},
        Line{128, 80'000, 13.5e-3, 24.3e-6}, Line{128, 5'120'000, 833e-3, 120.6e-6}}) {
    const Network network = cluster(line.ranks);
    const ReductionSize size = decode_size(line.ranks, line.tokens);
    const double ring = cost_of(Strategy::kRing, network, equal_shares(network), size).seconds;
    const double fused = cost_of(Strategy::kButterfly, network, equal_shares(network), size).seconds;
    EXPECT_NEAR(ring / line.ring, 1, 0.005) << line.ranks << " ranks, " << line.tokens << " tokens";
    EXPECT_NEAR(fused / line.fused, 1, 0.005) << line.ranks << " ranks, " << line.tokens << " tokens";
  }
}

TEST(CostTest, RingAgainstTreeIsTheClosedForm) {
  const int p = 128;
  const Network network = cluster(p);
  const ReductionSize size = decode_size(p, 5'120'000);
  const double kv = static_cast<double>(size.kv_bytes_of_rank[0]);
  const double work = kv / size.attention_bytes_per_s;
  const double ring = (p - 1) * (4e-6 + kv / 50e9) + work;
  // 3 levels inside the nodes and 4 between them, up and down; a state of 8 KB adds next to nothing.
  const double tree = work + 2 * (3 * 2e-6 + 4 * 4e-6);
  const auto seconds = [&](Strategy strategy) {
    return cost_of(strategy, network, equal_shares(network), size).seconds;
  };
  EXPECT_NEAR(seconds(Strategy::kRing) / seconds(Strategy::kMerge) / (ring / tree), 1, 0.02);
  EXPECT_NEAR(seconds(Strategy::kRing) / seconds(Strategy::kTwoLevel) / (ring / tree), 1, 0.02);
}

TEST(CostTest, StrategiesAreRankedByTime) {
  const Network network = cluster(128);
  const auto ranked = rank_strategies(network, equal_shares(network), decode_size(128, 5'120'000), true);
  ASSERT_EQ(ranked.size(), 5u);
  for (std::size_t i = 1; i < ranked.size(); ++i) EXPECT_LE(ranked[i - 1].second.seconds, ranked[i].second.seconds);
  for (const auto& [strategy, cost] : ranked) EXPECT_TRUE(same_bits(strategy)) << strategy_name(strategy);
  EXPECT_EQ(ranked.front().first, Strategy::kButterfly) << "half the steps, and the states are small";
  EXPECT_EQ(ranked.back().first, Strategy::kRing);

  // Long states over a thin link: the tree sends the fewest bytes.
  Network thin = cluster(128);
  thin.adapters_per_node = 1;
  thin.remote = {4e-6, 1e8};
  ReductionSize many = decode_size(128, 5'120'000);
  many.rows = 4096;
  EXPECT_EQ(rank_strategies(thin, equal_shares(thin), many).front().first, Strategy::kMerge);
}

TEST(CostTest, ManyRanks) {
  const Network network = cluster(4096);
  const Shares shares = equal_shares(network, 65536);
  const ReductionSize size = decode_size(4096, 1 << 24);
  EXPECT_EQ(cost_of(Strategy::kMerge, network, shares, size).bytes, tree_decode_bytes(4096, size));
  EXPECT_EQ(cost_of(Strategy::kButterfly, network, shares, size).bytes, butterfly_decode_bytes(4096, size));
  EXPECT_EQ(cost_of(Strategy::kGather, network, shares, size).bytes, gather_decode_bytes(4096, size));
  EXPECT_EQ(cost_of(Strategy::kTwoLevel, network, shares, size).bytes, tree_decode_bytes(4096, size));
  EXPECT_EQ(cost_of(Strategy::kRing, network, shares, size).bytes, ring_decode_bytes(size.kv_bytes_of_rank));
}

TEST(CostTest, ErrorsNameTheValue) {
  const auto refused = [](Strategy strategy, auto change) -> std::string {
    Network network = cluster(4);
    ReductionSize size = decode_size(4, 4096);
    const Shares shares = equal_shares(network);
    change(network, size);
    try {
      cost_of(strategy, network, shares, size);
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "";
  };
  const Strategy merge = Strategy::kMerge;
  EXPECT_EQ(refused(merge, [](Network&, ReductionSize&) {}), "");
  EXPECT_EQ(refused(merge, [](Network& n, auto&) { n.node_of_rank.pop_back(); }),
            "node_of_rank holds 3 values; accepted: 4");
  EXPECT_EQ(refused(merge, [](Network& n, auto&) { n.node_of_rank[2] = 4; }), "rank 2 is on node 4; accepted: 0 to 3");
  EXPECT_EQ(refused(merge, [](Network& n, auto&) { n.local.latency_s = -1; }), "latency_s = -1; accepted: 0 or more");
  EXPECT_EQ(refused(merge, [](Network& n, auto&) { n.remote.bytes_per_s = 0; }),
            "bytes_per_s = 0; accepted: more than 0");
  EXPECT_EQ(refused(merge, [](Network& n, auto&) { n.adapters_per_node = 0; }),
            "adapters_per_node = 0; accepted: 1 or more");
  EXPECT_EQ(refused(merge, [](Network& n, auto&) { n.merge_bytes_per_s = std::numeric_limits<double>::quiet_NaN(); }),
            "merge_bytes_per_s = nan; accepted: more than 0");
  EXPECT_EQ(refused(merge, [](auto&, ReductionSize& s) { s.rows = 0; }), "rows = 0; accepted: 1 or more");
  EXPECT_EQ(refused(merge, [](auto&, ReductionSize& s) { s.v_dim = -8; }), "v_dim = -8; accepted: 1 or more");
  EXPECT_EQ(refused(merge, [](auto&, ReductionSize& s) { s.kv_bytes_of_rank.pop_back(); }),
            "kv_bytes_of_rank holds 3 values; accepted: none or one per rank, 4");
  EXPECT_EQ(refused(Strategy::kRing, [](auto&, ReductionSize& s) { s.kv_bytes_of_rank.clear(); }),
            "kv_bytes_of_rank is empty; the ring sends K and V: one value per rank");
  EXPECT_EQ(refused(Strategy::kAuto, [](auto&, auto&) {}), "strategy auto has no cost; accepted: all but auto");
}

// The paper, section "Memory cost": "doubling the hidden size from 2048 to 4096 doubles the gap in peak memory, going
// from 524MB to 1040MB"; 64,000 tokens a device, bfloat16.
TEST(PaperTest, PeakMemory) {
  const auto gap = [](double d, double heads) {
    return 2 * (paper::ring_peak_memory(1, 64'000, d) - paper::tree_peak_memory(1, 64'000, d, heads));
  };
  EXPECT_EQ(gap(2048, 16), 524'288'000 - 64);  // 2btd - 2b n_h elements of 2 bytes
  EXPECT_NEAR(gap(2048, 16) / 524e6, 1, 0.001);
  EXPECT_NEAR(gap(4096, 32) / 1040e6, 1, 0.01);
  EXPECT_EQ(paper::ring_peak_memory(3, 5, 7), 4 * 3 * 5 * 7 + 2 * 3 * 7);
  EXPECT_EQ(paper::tree_peak_memory(3, 5, 7, 2), 2 * 3 * 5 * 7 + 2 * 3 * 7 + 2 * 3 * 2);
}

// Section "Communication volume", its example: 640,000 tokens on 8 devices, hidden size 2048.
TEST(PaperTest, Volume) {
  EXPECT_EQ(paper::ring_volume(1, 80'000, 2048, 8), 2'621'440'000.0);
  EXPECT_EQ(paper::tree_volume(1, 2048, 16, 8), 3640.0);  // 2 * 7 / 8 * (2048 + 32)
}

// Our bytes are the paper's elements: V_Tree is one rank's of 2 (p - 1) states, V_ring is one of the ring's p - 1
// steps.
TEST(PaperTest, VolumesAreTheCostsOfTheStrategies) {
  for (const int p : {2, 8, 128}) {
    const Network network = cluster(p);
    const std::uint64_t tokens = wide(p) * 1000;
    const ReductionSize size = decode_size(p, tokens);
    const Cost tree = cost_of(Strategy::kPaper, network, equal_shares(network), size);
    const Cost ring = cost_of(Strategy::kRing, network, equal_shares(network), size);
    EXPECT_DOUBLE_EQ(static_cast<double>(tree.bytes), 4 * p * paper::tree_volume(1, 2048, 16, p));
    EXPECT_DOUBLE_EQ(static_cast<double>(ring.bytes), 2 * (p - 1) * paper::ring_volume(1, 1000, 2048, p));
  }
}

}  // namespace
}  // namespace treeattn::plan
