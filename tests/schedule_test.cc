// SPDX-License-Identifier: Apache-2.0
// Schedules, executed: every rank holds a set of contributions, and messages move them about.
#include "plan/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <bitset>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "thinning.h"
#include "treeattn/error.h"

namespace treeattn::plan {
namespace {

constexpr int kMostRanks = 1000;
using Places = std::bitset<kMostRanks>;

std::size_t at(int i) { return static_cast<std::size_t>(i); }
int tree_levels(int n) { return std::bit_width(static_cast<unsigned>(n - 1)); }
int floor_log2(int n) { return std::bit_width(static_cast<unsigned>(n)) - 1; }

const std::vector<int>& rank_counts() {
  static const std::vector<int> counts = [] {
    std::vector<int> all(40);
    std::iota(all.begin(), all.end(), 1);
    for (const int more : {64, 100, 128}) all.push_back(more);
    if (thinning() == 1) all.push_back(kMostRanks);  // as long as all others together
    return all;
  }();
  return counts;
}

std::vector<int> random_order(std::mt19937& random, int ranks) {
  std::vector<int> order(at(ranks));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  return order;
}

// Ranks of a node are not next to each other; a node may have one rank.
std::vector<int> random_nodes(std::mt19937& random, int ranks) {
  const int nodes = 1 + static_cast<int>(random() % static_cast<unsigned>(ranks));
  std::vector<int> node_of_rank(at(ranks));
  for (int& node : node_of_rank) node = static_cast<int>(random() % static_cast<unsigned>(nodes));
  return node_of_rank;
}

std::size_t message_count(const Schedule& schedule) {
  std::size_t count = 0;
  for (const auto& round : schedule.rounds) count += round.size();
  return count;
}

Places span_of(const Message& message, int places) {
  Places span;
  for (int i = 0; i < message.count; ++i) span.set(at((message.first + i) % places));
  return span;
}

// Who has whose contribution. A partial result cannot be taken apart, so its sender must have exactly what the message
// says; parts can be chosen from. Nobody gets anything twice, and at the end everybody has everything.
void execute(const Schedule& schedule) {
  const int p = static_cast<int>(schedule.order.size());
  std::vector<Places> has(at(p));  // by rank
  for (int place = 0; place < p; ++place) has[at(schedule.order[at(place)])].set(at(place));
  Places all;
  for (int place = 0; place < p; ++place) all.set(at(place));
  for (std::size_t k = 0; k < schedule.rounds.size(); ++k) {
    SCOPED_TRACE(testing::Message() << "round " << k);
    ASSERT_FALSE(schedule.rounds[k].empty());
    const std::vector<Places> before = has;  // messages of a round do not see each other
    std::set<int> senders;
    std::set<int> receivers;
    for (const Message& message : schedule.rounds[k]) {
      SCOPED_TRACE(testing::Message() << message.from << " to " << message.to);
      ASSERT_NE(message.from, message.to);
      ASSERT_TRUE(senders.insert(message.from).second) << "sends twice";
      ASSERT_TRUE(receivers.insert(message.to).second) << "receives twice";
      ASSERT_TRUE(message.first >= 0 && message.first < p && message.count > 0 && message.count <= p);
      const Places span = span_of(message, p);
      const Places& sender = before[at(message.from)];
      Places& receiver = has[at(message.to)];
      switch (message.payload) {
        case Payload::kPartial:
          ASSERT_EQ(sender, span) << "is not what the sender has";
          ASSERT_TRUE((receiver & span).none()) << "a contribution comes twice";
          receiver |= span;
          break;
        case Payload::kParts:
          ASSERT_EQ(sender & span, span) << "is more than the sender has";
          ASSERT_TRUE((receiver & span).none()) << "a part comes twice";
          receiver |= span;
          break;
        case Payload::kResult:
          ASSERT_EQ(span, all);
          ASSERT_EQ(sender, all) << "the sender has no result yet";
          ASSERT_NE(receiver, all) << "the result comes twice";
          receiver = all;
          break;
      }
    }
  }
  for (int rank = 0; rank < p; ++rank) ASSERT_EQ(has[at(rank)], all) << "rank " << rank;
}

// The same with the nodes of the tree that each rank has states of, and messages of no state left out. Counts them leaf
// by leaf and compares with states_in; the last set of every rank is the root.
void execute_sets(const Schedule& schedule, const Shares& shares) {
  const int p = shares.ranks();
  std::vector<NodeSet> has(at(p));
  for (int rank = 0; rank < p; ++rank) has[at(rank)] = shares.nodes_of(rank);
  std::vector<int> place_of_rank(at(p));
  for (int place = 0; place < p; ++place) place_of_rank[at(schedule.order[at(place)])] = place;
  const auto counts = states_of(schedule, shares, true);
  const auto free_counts = states_of(schedule, shares, false);
  for (std::size_t k = 0; k < schedule.rounds.size(); ++k) {
    const std::vector<NodeSet> before = has;
    for (std::size_t i = 0; i < schedule.rounds[k].size(); ++i) {
      const Message& message = schedule.rounds[k][i];
      ASSERT_EQ(states_in(message, schedule, shares, true), counts[k][i]);
      ASSERT_EQ(states_in(message, schedule, shares, false), free_counts[k][i]);
      if (message.payload == Payload::kResult) {
        ASSERT_EQ(counts[k][i], 1u);
        ASSERT_EQ(free_counts[k][i], 1u);
        ASSERT_EQ(before[at(message.from)], cover(0, shares.branches()));
        has[at(message.to)] = before[at(message.from)];
        continue;
      }
      const Places span = span_of(message, p);
      std::vector<int> leaves;
      std::map<int, std::vector<int>> leaves_of_rank;
      for (int leaf = 0; leaf < shares.branches(); ++leaf) {
        const int rank = shares.rank_of(leaf);
        if (!span.test(at(place_of_rank[at(rank)]))) continue;
        leaves.push_back(leaf);
        leaves_of_rank[rank].push_back(leaf);
      }
      const NodeSet sent = cover(leaves);
      if (message.payload == Payload::kPartial) {
        ASSERT_EQ(counts[k][i], sent.size());
        ASSERT_EQ(free_counts[k][i], sent.empty() ? 0u : 1u);
        ASSERT_EQ(before[at(message.from)], sent);
      } else {
        std::size_t states = 0;
        for (const auto& [rank, own] : leaves_of_rank) states += cover(own).size();
        ASSERT_EQ(counts[k][i], states);
        ASSERT_EQ(free_counts[k][i], leaves_of_rank.size());
      }
      if (counts[k][i] > 0) has[at(message.to)] = unite(has[at(message.to)], sent);
    }
  }
  for (int rank = 0; rank < p; ++rank) ASSERT_EQ(has[at(rank)], cover(0, shares.branches())) << "rank " << rank;
}

// Equal, weighted with some weights 0, and leaves scattered without order; more and fewer leaves than ranks.
std::vector<Shares> some_shares(std::mt19937& random, const std::vector<int>& order) {
  const int p = static_cast<int>(order.size());
  std::vector<double> weights(order.size());
  for (double& weight : weights) weight = static_cast<double>(random() % 4);
  weights[0] = 1;
  std::vector<int> scattered(256);
  for (int& rank : scattered) rank = static_cast<int>(random() % static_cast<unsigned>(p));
  return {Shares::weighted(256, order, {}), Shares::weighted(4, order, {}), Shares::weighted(512, order, weights),
          Shares(p, scattered)};
}

void check(const Schedule& schedule, std::mt19937& random) {
  ASSERT_NO_FATAL_FAILURE(execute(schedule));
  for (const Shares& shares : some_shares(random, schedule.order)) {
    ASSERT_NO_FATAL_FAILURE(execute_sets(schedule, shares)) << shares.branches() << " branches";
  }
}

TEST(ScheduleTest, Tree) {
  std::mt19937 random(1);
  for (const int p : rank_counts()) {
    SCOPED_TRACE(testing::Message() << p << " ranks");
    const Schedule schedule = tree_schedule(random_order(random, p));
    ASSERT_EQ(schedule.rounds.size(), at(2 * tree_levels(p)));
    ASSERT_EQ(message_count(schedule), at(2 * (p - 1)));
    ASSERT_NO_FATAL_FAILURE(check(schedule, random));
  }
}

TEST(ScheduleTest, Butterfly) {
  std::mt19937 random(2);
  for (const int p : rank_counts()) {
    SCOPED_TRACE(testing::Message() << p << " ranks");
    const Schedule schedule = butterfly_schedule(random_order(random, p));
    const int q = 1 << floor_log2(p);
    ASSERT_EQ(schedule.rounds.size(), at(floor_log2(p) + (p == q ? 0 : 2)));
    ASSERT_EQ(message_count(schedule), at(q * floor_log2(p) + 2 * (p - q)));
    ASSERT_NO_FATAL_FAILURE(check(schedule, random));
  }
}

TEST(ScheduleTest, Gather) {
  std::mt19937 random(3);
  for (const int p : rank_counts()) {
    SCOPED_TRACE(testing::Message() << p << " ranks");
    const Schedule schedule = gather_schedule(random_order(random, p));
    ASSERT_EQ(schedule.rounds.size(), at(tree_levels(p)));
    ASSERT_EQ(message_count(schedule), at(p * tree_levels(p)));
    int parts = 0;
    for (const auto& round : schedule.rounds) {
      for (const Message& message : round) parts += message.count;
    }
    ASSERT_EQ(parts, p * (p - 1));
    ASSERT_NO_FATAL_FAILURE(check(schedule, random));
  }
}

TEST(ScheduleTest, TwoLevelOnRandomNodes) {
  std::mt19937 random(4);
  for (const int p : rank_counts()) {
    for (int trial = 0; trial < (p <= 40 ? 5 : 1); ++trial) {
      const std::vector<int> node_of_rank = random_nodes(random, p);
      std::map<int, int> size_of_node;
      std::map<int, int> first_of_node;
      for (int rank = 0; rank < p; ++rank) {
        ++size_of_node[node_of_rank[at(rank)]];
        first_of_node.emplace(node_of_rank[at(rank)], rank);
      }
      const int nodes = static_cast<int>(size_of_node.size());
      int largest = 0;
      for (const auto& [node, size] : size_of_node) largest = std::max(largest, size);
      SCOPED_TRACE(testing::Message() << p << " ranks on " << nodes << " nodes");

      const Schedule schedule = two_level_schedule(node_of_rank);
      ASSERT_EQ(schedule.rounds.size(), at(2 * tree_levels(largest) + 2 * tree_levels(nodes)));
      int across = 0;
      std::map<int, int> inside;
      for (const auto& round : schedule.rounds) {
        for (const Message& message : round) {
          const int from = node_of_rank[at(message.from)];
          const int to = node_of_rank[at(message.to)];
          if (from == to) {
            ++inside[from];
            continue;
          }
          ++across;
          ASSERT_EQ(message.from, first_of_node[from]);
          ASSERT_EQ(message.to, first_of_node[to]);
        }
      }
      ASSERT_EQ(across, 2 * (nodes - 1));
      for (const auto& [node, size] : size_of_node) ASSERT_EQ(inside[node], 2 * (size - 1)) << "node " << node;
      ASSERT_NO_FATAL_FAILURE(check(schedule, random));
    }
  }
}

// On one node, and with every rank on its own, it is the tree.
TEST(ScheduleTest, TwoLevelOfOneLevelIsTheTree) {
  for (const int p : {1, 2, 5, 8, 13}) {
    std::vector<int> order(at(p));
    std::iota(order.begin(), order.end(), 0);
    const Schedule tree = tree_schedule(order);
    for (const auto& nodes : {std::vector<int>(at(p), 0), order}) {
      const Schedule two = two_level_schedule(nodes);
      EXPECT_EQ(two.order, tree.order);
      EXPECT_EQ(two.rounds, tree.rounds);
    }
  }
}

TEST(ScheduleTest, DrawnExamplesOfTheDocumentation) {
  const std::vector<int> order = {0, 1, 2, 3, 4};
  const auto arrows = [](const Schedule& schedule) {
    std::vector<std::string> rounds;
    for (const auto& round : schedule.rounds) {
      std::string& line = rounds.emplace_back();
      for (const Message& message : round) {
        if (!line.empty()) line += ' ';
        line += std::to_string(message.from) + '>' + std::to_string(message.to);
      }
    }
    return rounds;
  };
  using Lines = std::vector<std::string>;
  EXPECT_EQ(arrows(tree_schedule(order)), (Lines{"1>0 3>2", "2>0", "4>0", "0>4", "0>2", "0>1 2>3"}));
  EXPECT_EQ(arrows(butterfly_schedule(order)), (Lines{"1>0", "0>2 2>0 3>4 4>3", "0>3 2>4 3>0 4>2", "0>1"}));
  EXPECT_EQ(arrows(gather_schedule(order)),
            (Lines{"1>0 2>1 3>2 4>3 0>4", "2>0 3>1 4>2 0>3 1>4", "4>0 0>1 1>2 2>3 3>4"}));
  EXPECT_EQ(arrows(two_level_schedule(std::vector<int>{0, 0, 0, 1, 1})),
            (Lines{"1>0 4>3", "2>0", "3>0", "0>3", "0>2", "0>1 3>4"}));
}

TEST(ScheduleTest, WhatOneRankSees) {
  std::mt19937 random(5);
  for (const int p : {1, 2, 7, 16, 23}) {
    const std::vector<int> nodes = random_nodes(random, p);
    for (const Strategy strategy : {Strategy::kMerge, Strategy::kButterfly, Strategy::kGather, Strategy::kTwoLevel}) {
      const Schedule schedule = make_schedule(strategy, nodes);
      EXPECT_EQ(schedule.order, ranks_by_node(nodes));
      std::size_t seen = 0;
      for (int rank = 0; rank < p; ++rank) {
        const Schedule mine = schedule.seen_by(rank);
        EXPECT_EQ(mine.order, schedule.order);
        ASSERT_EQ(mine.rounds.size(), schedule.rounds.size());
        for (std::size_t k = 0; k < mine.rounds.size(); ++k) {
          for (const Message& message : mine.rounds[k]) {
            EXPECT_TRUE(message.from == rank || message.to == rank);
            EXPECT_EQ(std::count(schedule.rounds[k].begin(), schedule.rounds[k].end(), message), 1);
          }
        }
        seen += message_count(mine);
      }
      EXPECT_EQ(seen, 2 * message_count(schedule)) << "by its sender and by its receiver";
    }
  }
}

TEST(ScheduleTest, MakeScheduleTakesTheRanksNodeByNode) {
  const std::vector<int> nodes = {1, 0, 1, 0, 2};
  const std::vector<int> order = {1, 3, 0, 2, 4};
  EXPECT_EQ(make_schedule(Strategy::kMerge, nodes).rounds, tree_schedule(order).rounds);
  EXPECT_EQ(make_schedule(Strategy::kButterfly, nodes).rounds, butterfly_schedule(order).rounds);
  EXPECT_EQ(make_schedule(Strategy::kGather, nodes).rounds, gather_schedule(order).rounds);
  EXPECT_EQ(make_schedule(Strategy::kTwoLevel, nodes).rounds, two_level_schedule(nodes).rounds);
  for (const Strategy strategy : {Strategy::kPaper, Strategy::kTwoPhase, Strategy::kRing, Strategy::kAuto}) {
    EXPECT_THROW(make_schedule(strategy, nodes), InvalidArgument) << strategy_name(strategy);
  }
}

TEST(ScheduleTest, ARankWithoutLeavesSendsNothing) {
  const std::vector<int> order = {0, 1, 2, 3};
  const Shares shares = Shares::weighted(64, order, std::vector<double>{1, 0, 1, 0});
  const Schedule tree = tree_schedule(order);
  for (const bool canonical : {true, false}) {
    EXPECT_EQ(states_of(tree, shares, canonical), (std::vector<std::vector<std::size_t>>{{0, 0}, {1}, {1}, {1, 1}}));
  }
  // Parts of two ranks, one of them empty.
  const Schedule gather = gather_schedule(order);
  EXPECT_EQ(states_of(gather, shares, true), (std::vector<std::vector<std::size_t>>{{0, 1, 0, 1}, {1, 1, 1, 1}}));
}

TEST(StrategyTest, NamesThereAndBack) {
  std::set<std::string_view> names;
  for (const Strategy strategy : kAllStrategies) {
    EXPECT_EQ(parse_strategy(strategy_name(strategy)), strategy);
    names.insert(strategy_name(strategy));
  }
  EXPECT_EQ(names.size(), 7u);
  EXPECT_EQ(parse_strategy("auto"), Strategy::kAuto);
  EXPECT_EQ(parse_strategy("two_level"), Strategy::kTwoLevel);
  EXPECT_FALSE(same_bits(Strategy::kPaper));
  EXPECT_TRUE(same_bits(Strategy::kRing));
}

TEST(StrategyTest, AnUnknownNameIsRefusedWithThoseThatAreKnown) {
  for (const std::string_view name : {"", "Merge", "merge ", "tree"}) {
    try {
      parse_strategy(name);
      FAIL() << name;
    } catch (const InvalidArgument& error) {
      EXPECT_EQ(error.what(), "strategy = \"" + std::string(name) +
                                  "\"; accepted: paper, two_phase, merge, butterfly, gather, two_level, ring, auto");
    }
  }
}

}  // namespace
}  // namespace treeattn::plan
