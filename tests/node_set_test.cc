// SPDX-License-Identifier: Apache-2.0
// Covers of sets of leaves: correct, unique, minimal and small.
#include "plan/node_set.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <ostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace treeattn::plan {

void PrintTo(const TreeNode& node, std::ostream* out) { *out << "{" << node.level << ", " << node.index << "}"; }

namespace {

std::vector<int> leaves_of(const NodeSet& set) {
  std::vector<int> leaves;
  for (const TreeNode& node : set) {
    for (int leaf = node.first_leaf(); leaf < node.last_leaf(); ++leaf) leaves.push_back(leaf);
  }
  return leaves;
}

// The fewest disjoint nodes that cover the leaves that are set, from the root down: a node whose leaves are all set is
// one, of any other its children are asked.
std::size_t fewest_nodes(const std::vector<bool>& in, int level, int index) {
  const auto first = in.begin() + (static_cast<std::ptrdiff_t>(index) << level);
  const auto last = first + (std::ptrdiff_t{1} << level);
  if (std::find(first, last, true) == last) return 0;
  if (std::find(first, last, false) == last) return 1;
  return fewest_nodes(in, level - 1, 2 * index) + fewest_nodes(in, level - 1, 2 * index + 1);
}

void expect_canonical(const NodeSet& set) {
  for (std::size_t i = 0; i + 1 < set.size(); ++i) {
    ASSERT_LE(set[i].last_leaf(), set[i + 1].first_leaf()) << "disjoint and ascending";
    ASSERT_FALSE(set[i].level == set[i + 1].level && set[i].parent() == set[i + 1].parent()) << "siblings";
  }
}

std::vector<int> random_leaves(std::mt19937& random, int branches) {
  const double density = std::uniform_real_distribution<double>(0, 1)(random);
  std::bernoulli_distribution take(density);
  std::vector<int> leaves;
  for (int leaf = 0; leaf < branches; ++leaf) {
    if (take(random)) leaves.push_back(leaf);
  }
  return leaves;
}

TEST(NodeSetTest, DrawnExampleOfTheHeader) { EXPECT_EQ(cover(1, 7), (NodeSet{{0, 1}, {1, 1}, {1, 2}, {0, 6}})); }

TEST(NodeSetTest, NodesKnowTheirLeavesAndTheirParent) {
  const TreeNode node{3, 5};
  EXPECT_EQ(node.first_leaf(), 40);
  EXPECT_EQ(node.last_leaf(), 48);
  EXPECT_FALSE(node.is_left());
  EXPECT_EQ(node.parent(), (TreeNode{4, 2}));
}

TEST(NodeSetTest, WholeTreesAreOneNodeAndNothingIsNone) {
  for (int level = 0; level <= 16; ++level) EXPECT_EQ(cover(0, 1 << level), (NodeSet{{level, 0}}));
  EXPECT_TRUE(cover(5, 5).empty());
  EXPECT_TRUE(cover(std::vector<int>{}).empty());
  EXPECT_TRUE(cover(std::vector<TreeNode>{}).empty());
}

// All ranges of all trees up to 128 leaves: the leaves are those, no two nodes are siblings, and the number of nodes is
// the bound of the header at most, which the worst range reaches.
TEST(NodeSetTest, EveryRange) {
  for (int levels = 0; levels <= 7; ++levels) {
    const int branches = 1 << levels;
    const std::size_t bound = branches >= 4 ? static_cast<std::size_t>(2 * levels - 2) : 1;
    std::size_t most = 0;
    for (int first = 0; first < branches; ++first) {
      for (int last = first + 1; last <= branches; ++last) {
        SCOPED_TRACE(testing::Message() << "leaves " << first << " to " << last << " of " << branches);
        std::vector<int> leaves;
        for (int leaf = first; leaf < last; ++leaf) leaves.push_back(leaf);
        const NodeSet set = cover(first, last);
        ASSERT_EQ(leaves_of(set), leaves);
        ASSERT_NO_FATAL_FAILURE(expect_canonical(set));
        ASSERT_EQ(set, cover(leaves)) << "leaf by leaf";
        most = std::max(most, set.size());
      }
    }
    EXPECT_EQ(most, bound) << branches;
  }
}

// All 65,536 sets of 16 leaves: the cover has their leaves and as few nodes as can be.
TEST(NodeSetTest, EverySetOfSixteenLeavesIsCoveredByTheFewestNodes) {
  for (unsigned bits = 0; bits < 65536; ++bits) {
    std::vector<bool> in(16);
    std::vector<int> leaves;
    for (int leaf = 0; leaf < 16; ++leaf) {
      if ((bits >> leaf & 1) == 0) continue;
      in[static_cast<std::size_t>(leaf)] = true;
      leaves.push_back(leaf);
    }
    const NodeSet set = cover(leaves);
    ASSERT_EQ(leaves_of(set), leaves);
    ASSERT_EQ(set.size(), fewest_nodes(in, 4, 0)) << bits;
    ASSERT_NO_FATAL_FAILURE(expect_canonical(set));
  }
}

TEST(NodeSetTest, UniteIsTheCoverOfTheUnion) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 2000; ++trial) {
    const int branches = 1 << (trial % 11);
    const std::vector<int> all = random_leaves(random, branches);
    std::vector<int> some;
    std::vector<int> others;
    for (const int leaf : all) (random() % 2 == 0 ? some : others).push_back(leaf);
    const NodeSet a = cover(some);
    const NodeSet b = cover(others);
    ASSERT_EQ(unite(a, b), cover(all));
    ASSERT_EQ(unite(b, a), cover(all));
    ASSERT_EQ(unite(a, {}), a);
    NodeSet both = a;
    both.insert(both.end(), b.begin(), b.end());
    std::shuffle(both.begin(), both.end(), random);
    ASSERT_EQ(cover(both), cover(all));
  }
}

// However a set of leaves is put together, the tree of merges below each of its nodes is the same: that is why the bits
// do not depend on who merges. Here a state is the expression that made it.
TEST(NodeSetTest, MergesMakeTheSameExpressionInAnyGrouping) {
  const auto append = [](NodeSet& set, std::vector<std::string>& states, TreeNode node, const std::string& state) {
    states.push_back(state);
    append_node(set, node, [&] {
      const std::string right = states.back();
      states.pop_back();
      states.back() = "(" + states.back() + right + ")";
    });
  };
  std::mt19937 random(2);
  for (int trial = 0; trial < 200; ++trial) {
    // Three ranks; each makes its own states from its leaves, then those of all are united.
    NodeSet sets[3];
    std::vector<std::string> states[3];
    for (int leaf = 0; leaf < 8; ++leaf) {
      const std::size_t rank = random() % 3;
      append(sets[rank], states[rank], {0, leaf}, std::to_string(leaf));
    }
    std::vector<std::pair<TreeNode, std::string>> nodes;
    for (std::size_t rank = 0; rank < 3; ++rank) {
      for (std::size_t i = 0; i < sets[rank].size(); ++i) nodes.emplace_back(sets[rank][i], states[rank][i]);
    }
    std::sort(nodes.begin(), nodes.end(),
              [](const auto& a, const auto& b) { return a.first.first_leaf() < b.first.first_leaf(); });
    NodeSet root;
    std::vector<std::string> result;
    for (const auto& [node, state] : nodes) append(root, result, node, state);
    ASSERT_EQ(root, cover(0, 8));
    ASSERT_EQ(result, std::vector<std::string>{"(((01)(23))((45)(67)))"});
  }
}

}  // namespace
}  // namespace treeattn::plan
