// SPDX-License-Identifier: Apache-2.0
// Which rank carries which leaf.
#include "plan/shares.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "treeattn/error.h"

namespace treeattn::plan {
namespace {

std::vector<int> counting(int ranks) {
  std::vector<int> order(static_cast<std::size_t>(ranks));
  std::iota(order.begin(), order.end(), 0);
  return order;
}

// Every leaf has one rank, ranks follow each other in `order`, every boundary is within half a leaf of where it should
// be, so every share within one leaf, and weight 0 carries nothing.
void expect_fair(const Shares& shares, int branches, const std::vector<int>& order,
                 const std::vector<double>& weights) {
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  ASSERT_EQ(shares.branches(), branches);
  ASSERT_EQ(static_cast<std::size_t>(shares.ranks()), order.size());
  int leaf = 0;
  double boundary = 0;
  for (const int rank : order) {
    const double weight = weights.empty() ? 1 : weights[static_cast<std::size_t>(rank)];
    const double want = weight * branches / (weights.empty() ? static_cast<double>(order.size()) : total);
    const std::vector<int> leaves = shares.leaves_of(rank);
    for (const int got : leaves) ASSERT_EQ(got, leaf++) << "rank " << rank;
    boundary += want;
    ASSERT_LE(std::abs(static_cast<double>(leaves.size()) - want), 1 + 1e-9) << "rank " << rank;
    ASSERT_LE(std::abs(leaf - boundary), 0.5 + 1e-9) << "rank " << rank;
    if (weight == 0) {
      ASSERT_TRUE(leaves.empty()) << "rank " << rank;
    }
    ASSERT_EQ(shares.nodes_of(rank), cover(leaves));
    for (const int got : leaves) ASSERT_EQ(shares.rank_of(got), rank);
  }
  ASSERT_EQ(leaf, branches);
}

TEST(SharesTest, EqualSharesOfAnyNumberOfRanks) {
  for (int branches = 1; branches <= 1024; branches *= 2) {
    for (int ranks = 1; ranks <= 130; ++ranks) {
      SCOPED_TRACE(testing::Message() << branches << " branches, " << ranks << " ranks");
      const Shares shares = Shares::weighted(branches, counting(ranks), {});
      ASSERT_NO_FATAL_FAILURE(expect_fair(shares, branches, counting(ranks), {}));
    }
  }
}

TEST(SharesTest, AShareOfAPowerOfTwoOfRanksIsOneNode) {
  const Shares shares = Shares::weighted(64, counting(8), {});
  for (int rank = 0; rank < 8; ++rank) EXPECT_EQ(shares.nodes_of(rank), (NodeSet{{3, rank}}));
}

TEST(SharesTest, WeightsInAnyOrderOfTheRanks) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 2000; ++trial) {
    const int branches = 1 << random() % 11;
    std::vector<int> order = counting(1 + static_cast<int>(random() % 40));
    std::shuffle(order.begin(), order.end(), random);
    std::vector<double> weights;
    for (std::size_t i = 0; i < order.size(); ++i) {
      const bool none = random() % 4 == 0;
      weights.push_back(none ? 0.0 : std::exp(std::normal_distribution<double>(0, 3)(random)));
    }
    if (std::accumulate(weights.begin(), weights.end(), 0.0) == 0) weights[0] = 1e-300;
    ASSERT_NO_FATAL_FAILURE(expect_fair(Shares::weighted(branches, order, weights), branches, order, weights));
  }
}

TEST(SharesTest, TwiceTheWeightIsTwiceTheLeaves) {
  const Shares shares = Shares::weighted(64, counting(3), std::vector<double>{1, 2, 1});
  EXPECT_EQ(shares.leaves_of(0).size(), 16u);
  EXPECT_EQ(shares.leaves_of(1).size(), 32u);
  EXPECT_EQ(shares.leaves_of(2).size(), 16u);
}

TEST(SharesTest, MoreRanksThanBranches) {
  const Shares shares = Shares::weighted(4, counting(10), {});
  std::size_t most = 0;
  for (int rank = 0; rank < 10; ++rank) most = std::max(most, shares.leaves_of(rank).size());
  EXPECT_EQ(most, 1u);
  EXPECT_EQ(Shares::weighted(1, counting(3), std::vector<double>{0, 0, 5}).rank_of(0), 2);
}

TEST(SharesTest, RanksOfANodeFollowEachOther) {
  const std::vector<int> nodes = {1, 0, 1, 2, 0, 1};
  EXPECT_EQ(ranks_by_node(nodes), (std::vector<int>{1, 4, 0, 2, 5, 3}));
  const Shares shares = Shares::weighted(64, ranks_by_node(nodes), {});
  for (int leaf = 1; leaf < 64; ++leaf) {
    EXPECT_LE(nodes[static_cast<std::size_t>(shares.rank_of(leaf - 1))],
              nodes[static_cast<std::size_t>(shares.rank_of(leaf))]);
  }
}

TEST(SharesTest, AnyAssignment) {
  std::mt19937 random(2);
  for (int trial = 0; trial < 200; ++trial) {
    const int ranks = 1 + static_cast<int>(random() % 9);
    std::vector<int> rank_of_leaf(64);
    for (int& rank : rank_of_leaf) rank = static_cast<int>(random() % static_cast<unsigned>(ranks));
    const Shares shares(ranks, rank_of_leaf);
    EXPECT_EQ(shares.rank_of_leaf(), rank_of_leaf);
    for (int rank = 0; rank < ranks; ++rank) EXPECT_EQ(shares.nodes_of(rank), cover(shares.leaves_of(rank)));
  }
}

// The message of what is thrown; empty if nothing is.
template <class Call>
std::string refused(const Call& call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

TEST(SharesTest, ErrorsNameTheValue) {
  const auto weighted = [](int branches, int ranks, std::vector<double> weights) {
    return refused([&] { Shares::weighted(branches, counting(ranks), weights); });
  };
  EXPECT_EQ(weighted(8, 2, {1, 1}), "");
  EXPECT_EQ(weighted(8, 2, {1, 2, 3}), "weights holds 3 values; accepted: none or one per rank, 2");
  EXPECT_EQ(weighted(8, 2, {1, -2}), "weights[1] = -2; accepted: 0 or more, finite");
  EXPECT_EQ(weighted(8, 2, {std::numeric_limits<double>::quiet_NaN(), 1}),
            "weights[0] = nan; accepted: 0 or more, finite");
  EXPECT_EQ(weighted(8, 2, {1, std::numeric_limits<double>::infinity()}),
            "weights[1] = inf; accepted: 0 or more, finite");
  EXPECT_EQ(weighted(8, 2, {0, 0}), "weights add up to 0; accepted: more than 0, finite");
  EXPECT_EQ(weighted(8, 2, {1e308, 1e308}), "weights add up to inf; accepted: more than 0, finite");
  EXPECT_EQ(refused([] {
              Shares::weighted(8, counting(2), {static_cast<const double*>(nullptr), 2});
            }),
            "weights = 0x0 with 2 values; accepted: an address that is a multiple of 8");
  EXPECT_EQ(weighted(0, 2, {}), "branches = 0; accepted: 1 or more");
  EXPECT_EQ(weighted(8, 0, {}), "ranks = 0; accepted: 1 or more");
  EXPECT_EQ(refused([] { Shares(2, {0, 1, 2, 0}); }), "leaf 2 belongs to rank 2; accepted: 0 to 1");
  EXPECT_EQ(refused([] { Shares(2, {0, -1}); }), "leaf 1 belongs to rank -1; accepted: 0 to 1");
}

}  // namespace
}  // namespace treeattn::plan
