// SPDX-License-Identifier: Apache-2.0
// The canonical order of the reduction: leaves, branches and chunks.
#include "plan/tree_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace treeattn::plan {
namespace {

constexpr int kMostBranches = 65536;

static_assert(branch_of_leaf(0, 1) == 0);
static_assert(branch_of_leaf(1, 8) == 4 && branch_of_leaf(3, 8) == 6 && branch_of_leaf(6, 8) == 3);
static_assert(log2_exact(1) == 0 && log2_exact(kMostBranches) == 16);

TEST(TreeOrderTest, DrawnExampleOfTheHeader) {
  const int drawn[] = {0, 4, 2, 6, 1, 5, 3, 7};
  for (int leaf = 0; leaf < 8; ++leaf) EXPECT_EQ(branch_of_leaf(leaf, 8), drawn[leaf]);
}

TEST(TreeOrderTest, Log2OfEveryPowerOfTwo) {
  for (int bits = 0; bits <= 30; ++bits) EXPECT_EQ(log2_exact(1 << bits), bits);
}

TEST(TreeOrderTest, LeavesAndBranchesAreABijectionAndItsOwnInverse) {
  for (int branches = 1; branches <= kMostBranches; branches *= 2) {
    std::vector<bool> seen(static_cast<std::size_t>(branches), false);
    for (int leaf = 0; leaf < branches; ++leaf) {
      const int branch = branch_of_leaf(leaf, branches);
      ASSERT_GE(branch, 0);
      ASSERT_LT(branch, branches) << "leaf " << leaf;
      ASSERT_FALSE(seen[static_cast<std::size_t>(branch)]) << "leaf " << leaf << " of " << branches;
      seen[static_cast<std::size_t>(branch)] = true;
      ASSERT_EQ(branch_of_leaf(branch, branches), leaf) << "of " << branches;
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
        for (int leaf = first; leaf < first + size; ++leaf) covered.push_back(branch_of_leaf(leaf, branches));
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
      for (int leaf = first; leaf < last; ++leaf)
        ++before[static_cast<std::size_t>(branch_of_leaf(leaf, branches)) + 1];
      for (std::size_t b = 1; b < before.size(); ++b) before[b] += before[b - 1];
      for (std::size_t b = 0; b < before.size(); ++b) {
        const double share = static_cast<double>(b) * (last - first) / branches;
        ASSERT_LT(std::abs(before[b] - share), 2 * log2_exact(branches)) << first << " to " << last;
      }
    }
  }
}

TEST(TreeOrderTest, FirstChunkOfABranchAgainstBruteForce) {
  for (const std::int64_t chunk_tokens : {1, 3, 64, 256}) {
    for (const int branches : {1, 2, 8, 64}) {
      const TreeOrder order{chunk_tokens, branches};
      // Three rounds of the branches and a bit, and the same far beyond 2^32.
      const std::int64_t span = 3 * branches * chunk_tokens + 5;
      const std::int64_t step = std::max<std::int64_t>(1, chunk_tokens / 5);
      for (const std::int64_t origin : {std::int64_t{0}, (std::int64_t{1} << 40) + 12345}) {
        for (std::int64_t position = origin; position < origin + span; position += step) {
          for (int branch = 0; branch < branches; ++branch) {
            std::int64_t want = std::max<std::int64_t>(0, position / chunk_tokens - 2);
            while ((want + 1) * chunk_tokens <= position || order.branch_of_chunk(want) != branch) ++want;
            ASSERT_EQ(first_chunk_of(order, branch, position), want)
                << "position " << position << ", branch " << branch << " of " << branches << ", chunk " << chunk_tokens;
          }
        }
      }
    }
  }
}

TEST(TreeOrderTest, EveryPositionIsInTheChunkOfItsBranch) {
  const TreeOrder order{64, 8};
  for (std::int64_t position = 0; position < 64 * 8 * 3; ++position) {
    const std::int64_t chunk = order.chunk_of(position);
    EXPECT_LE(chunk * order.chunk_tokens, position);
    EXPECT_LT(position, (chunk + 1) * order.chunk_tokens);
    EXPECT_EQ(first_chunk_of(order, order.branch_of_chunk(chunk), position), chunk);
  }
}

}  // namespace
}  // namespace treeattn::plan
