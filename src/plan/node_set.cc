// SPDX-License-Identifier: Apache-2.0
#include "plan/node_set.h"

#include <algorithm>
#include <bit>
#include <iterator>

namespace treeattn::plan {
namespace {

bool before(const TreeNode& a, const TreeNode& b) { return a.first_leaf() < b.first_leaf(); }

// Of disjoint nodes, ascending.
NodeSet cover_in_order(std::span<const TreeNode> nodes) {
  NodeSet set;
  for (const TreeNode& node : nodes) append_node(set, node, [] {});
  return set;
}

}  // namespace

NodeSet cover(int first, int last) {
  NodeSet set;
  while (first < last) {
    // The largest node that begins here and ends in time.
    const int fits = std::bit_width(static_cast<unsigned>(last - first)) - 1;
    const int level = std::min(fits, std::countr_zero(static_cast<unsigned>(first)));
    set.push_back({level, first >> level});
    first += 1 << level;
  }
  return set;
}

NodeSet cover(std::span<const int> leaves) {
  std::vector<TreeNode> nodes;
  for (const int leaf : leaves) nodes.push_back({0, leaf});
  return cover_in_order(nodes);
}

NodeSet cover(std::vector<TreeNode> nodes) {
  std::sort(nodes.begin(), nodes.end(), before);
  return cover_in_order(nodes);
}

bool contains(const NodeSet& set, int leaf) {
  const auto after = std::upper_bound(set.begin(), set.end(), TreeNode{0, leaf}, before);
  return after != set.begin() && leaf < std::prev(after)->last_leaf();
}

NodeSet unite(const NodeSet& a, const NodeSet& b) {
  std::vector<TreeNode> both(a.size() + b.size());
  std::merge(a.begin(), a.end(), b.begin(), b.end(), both.begin(), before);
  return cover_in_order(both);
}

}  // namespace treeattn::plan
