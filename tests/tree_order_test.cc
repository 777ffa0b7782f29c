// SPDX-License-Identifier: Apache-2.0
// The canonical order of the reduction: leaves, branches and chunks.
#include "plan/tree_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "plan/node_chunks.h"
#include "treeattn/error.h"

namespace treeattn::plan {
namespace {

constexpr int kMostBranches = 65536;

static_assert(reverse_bits(0, 1) == 0);
static_assert(reverse_bits(1, 8) == 4 && reverse_bits(3, 8) == 6 && reverse_bits(6, 8) == 3);
static_assert(log2_exact(1) == 0 && log2_exact(kMostBranches) == 16);

TEST(TreeOrderTest, DrawnExampleOfTheHeader) {
  const int drawn[] = {0, 4, 2, 6, 1, 5, 3, 7};
  for (int leaf = 0; leaf < 8; ++leaf) EXPECT_EQ(reverse_bits(leaf, 8), drawn[leaf]);
}

TEST(TreeOrderTest, Log2OfEveryPowerOfTwo) {
  for (int bits = 0; bits <= 30; ++bits) EXPECT_EQ(log2_exact(1 << bits), bits);
}

TEST(TreeOrderTest, LeavesAndBranchesAreABijectionAndItsOwnInverse) {
  for (int branches = 1; branches <= kMostBranches; branches *= 2) {
    std::vector<bool> seen(static_cast<std::size_t>(branches), false);
    for (int leaf = 0; leaf < branches; ++leaf) {
      const int branch = reverse_bits(leaf, branches);
      ASSERT_GE(branch, 0);
      ASSERT_LT(branch, branches) << "leaf " << leaf;
      ASSERT_FALSE(seen[static_cast<std::size_t>(branch)]) << "leaf " << leaf << " of " << branches;
      seen[static_cast<std::size_t>(branch)] = true;
      ASSERT_EQ(reverse_bits(branch, branches), leaf) << "of " << branches;
    }
  }
}

// A node of the tree is an aligned range of branches / 2^k leaves; its branches must be every 2^k-th.
TEST(TreeOrderTest, ANodeCoversEvenlySpreadBranches) {
  for (int branches = 1; branches <= 4096; branches *= 2) {
    for (int step = 1; step <= branches; step *= 2) {
      const int size = branches / step;
      for (int first = 0; first < branches; first += size) {
        std::vector<int> covered;
        for (int leaf = first; leaf < first + size; ++leaf) covered.push_back(reverse_bits(leaf, branches));
        std::sort(covered.begin(), covered.end());
        ASSERT_LT(covered[0], step);
        for (int i = 0; i < size; ++i) {
          ASSERT_EQ(covered[static_cast<std::size_t>(i)], covered[0] + i * step)
              << "leaves " << first << " to " << first + size << " of " << branches;
        }
      }
    }
  }
}

// Any contiguous range, as a rank carries it: no stretch of the sequence holds much more or less than its share. A
// range is at most two nodes of each level, and each node's count in a stretch is off its share by less than one.
TEST(TreeOrderTest, AnyRangeOfLeavesIsSpreadOverTheSequence) {
  const int branches = 64;
  for (int first = 0; first < branches; ++first) {
    for (int last = first + 1; last <= branches; ++last) {
      std::vector<int> before(static_cast<std::size_t>(branches) + 1, 0);
      for (int leaf = first; leaf < last; ++leaf) ++before[static_cast<std::size_t>(reverse_bits(leaf, branches)) + 1];
      for (std::size_t b = 1; b < before.size(); ++b) before[b] += before[b - 1];
      for (std::size_t b = 0; b < before.size(); ++b) {
        const double share = static_cast<double>(b) * (last - first) / branches;
        ASSERT_LT(std::abs(before[b] - share), 2 * log2_exact(branches)) << first << " to " << last;
      }
    }
  }
}

// Every order that has something particular: few and many branches, pieces of one and of several chunks.
std::vector<ReductionOrder> orders() {
  std::vector<ReductionOrder> out;
  for (const std::int64_t chunk_tokens : {64, 256}) {
    for (const int branches : {1, 2, 8, 64}) {
      out.push_back({chunk_tokens, branches});
      for (const std::int64_t chunks : {1, 3}) {
        out.push_back({chunk_tokens, branches, Placement::kContiguous, chunks * chunk_tokens});
      }
    }
  }
  return out;
}

// leaf_of_chunk defines the order; walking the chunks of a leaf must find just those.
TEST(TreeOrderTest, WalkingALeafFindsItsChunksAndNoOthers) {
  for (const ReductionOrder& order : orders()) {
    for (const std::int64_t origin : {std::int64_t{0}, std::int64_t{5}, (std::int64_t{1} << 40) + 12345}) {
      const std::int64_t last = origin + 3 * order.branches + 5;
      for (int leaf = 0; leaf < order.branches; ++leaf) {
        std::vector<std::int64_t> want, got;
        for (std::int64_t c = origin; c <= last; ++c) {
          if (leaf_of_chunk(order, c) == leaf) want.push_back(c);
        }
        for (std::int64_t c = first_chunk(order, leaf, origin); c <= last; c = next_chunk(order, leaf, c)) {
          got.push_back(c);
        }
        ASSERT_EQ(got, want) << "leaf " << leaf << " of " << order.branches << " from chunk " << origin;
        ASSERT_EQ(chunks_of_leaf(order, leaf, origin, last), static_cast<std::int64_t>(want.size()));
      }
    }
  }
}

// The same for the leaves of a node together, of every node of the tree.
TEST(TreeOrderTest, WalkingANodeFindsTheChunksOfItsLeavesAndNoOthers) {
  for (const ReductionOrder& order : orders()) {
    for (const std::int64_t origin : {std::int64_t{0}, std::int64_t{5}, (std::int64_t{1} << 40) + 12345}) {
      const std::int64_t last = origin + 3 * order.branches + 5;
      for (int level = 0; level <= log2_exact(order.branches); ++level) {
        for (int index = 0; index < order.branches >> level; ++index) {
          const TreeNode node{level, index};
          std::vector<std::int64_t> want, got;
          for (std::int64_t c = origin; c <= last; ++c) {
            const int leaf = leaf_of_chunk(order, c);
            if (leaf >= node.first_leaf() && leaf < node.last_leaf()) want.push_back(c);
          }
          const NodeChunks chunks = chunks_of_node(order, node);
          for (std::int64_t c = chunks.from(origin); c <= std::min(last, chunks.last); c += chunks.step) {
            got.push_back(c);
          }
          ASSERT_EQ(got, want) << "node " << index << " of level " << level << " of " << order.branches
                               << " branches, from chunk " << origin;
          ASSERT_EQ(chunks.from(origin), chunks.from(got.empty() ? origin : got.front()));
        }
      }
    }
  }
}

TEST(TreeOrderTest, CyclicGoesRoundAndContiguousGoesOn) {
  const ReductionOrder cyclic{64, 4};
  const ReductionOrder pieces{64, 4, Placement::kContiguous, 128};
  const int round[] = {0, 2, 1, 3, 0, 2, 1, 3, 0, 2};
  const int piece[] = {0, 0, 1, 1, 2, 2, 3, 3, 3, 3};  // what comes later belongs to the last
  for (int chunk = 0; chunk < 10; ++chunk) {
    EXPECT_EQ(leaf_of_chunk(cyclic, chunk), round[chunk]);
    EXPECT_EQ(leaf_of_chunk(pieces, chunk), piece[chunk]);
    EXPECT_EQ(branch_of_leaf(cyclic, leaf_of_chunk(cyclic, chunk)), chunk % 4);
  }
  EXPECT_EQ(chunk_of(cyclic, 63), 0);
  EXPECT_EQ(chunk_of(cyclic, 64), 1);
}

TEST(TreeOrderTest, RefusesABadOrderByName) {
  const auto message = [](const ReductionOrder& order) {
    try {
      check_order(order);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_EQ(message({}), "accepted");
  EXPECT_EQ(message({64, 2, Placement::kContiguous, 192}), "accepted");
  EXPECT_NE(message({100, 2}).find("chunk_tokens = 100"), std::string::npos);
  EXPECT_NE(message({64, 3}).find("branches = 3"), std::string::npos);
  EXPECT_NE(message({64, 2, Placement::kCyclic, 64}).find("branch_tokens = 64"), std::string::npos);
  EXPECT_NE(message({64, 2, Placement::kContiguous, 0}).find("branch_tokens = 0"), std::string::npos);
  EXPECT_NE(message({64, 2, static_cast<Placement>(7), 192}).find("placement = 7"), std::string::npos);
  EXPECT_NE(message({64, 2, Placement::kContiguous, 96}).find("branch_tokens = 96"), std::string::npos);
  // The last of the leaves begins at a chunk that is a number.
  constexpr std::int64_t kLongest = std::int64_t{1} << 46;
  EXPECT_EQ(message({64, 65536, Placement::kContiguous, kLongest}), "accepted");
  EXPECT_NE(message({64, 65536, Placement::kContiguous, kLongest + 64}).find("branch_tokens = 70368744177728"),
            std::string::npos);
  EXPECT_EQ(first_chunk({64, 65536, Placement::kContiguous, kLongest}, 65535, 0), 65535 * (kLongest / 64));
}

}  // namespace
}  // namespace treeattn::plan
