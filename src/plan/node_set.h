// SPDX-License-Identifier: Apache-2.0
// Sets of leaves of the canonical tree, written as the fewest nodes that cover them. A rank's contribution to the
// reduction is one state per node of its set; a contiguous range of leaves has at most 2 log2(branches) - 2 nodes
// (branches of 4 or more; of fewer, 1).
//
//   branches = 8, leaves 1 to 6:       {1}  {2 3}  {4 5}  {6}
#pragma once

#include <span>
#include <vector>

namespace treeattn::plan {

// The leaves [index << level, (index + 1) << level).
struct TreeNode {
  int level = 0;
  int index = 0;

  int first_leaf() const { return index << level; }
  int last_leaf() const { return (index + 1) << level; }  // one past
  bool is_left() const { return index % 2 == 0; }
  TreeNode parent() const { return {level + 1, index / 2}; }
  bool operator==(const TreeNode&) const = default;
};

// Disjoint, ascending by first leaf, and no two of them siblings: the cover of a set of leaves is unique.
using NodeSet = std::vector<TreeNode>;

// The cover of leaves [first, last).
NodeSet cover(int first, int last);
// The cover of any set of leaves, ascending.
NodeSet cover(std::span<const int> leaves);

// What uniting two sets asks of their states: take the nodes of both in ascending order one by one, and whenever the
// last two are siblings, merge them (left, right) and go on with the parent. Appends `node` to `set` in this manner and
// calls merge() once per merge; the last two states are then one. Requires node to come after all of set.
template <class Merge>
void append_node(NodeSet& set, TreeNode node, const Merge& merge) {
  set.push_back(node);
  while (set.size() >= 2) {
    const TreeNode& right = set[set.size() - 1];
    const TreeNode& left = set[set.size() - 2];
    if (left.level != right.level || !left.is_left() || left.index + 1 != right.index) return;
    const TreeNode parent = left.parent();
    set.pop_back();
    set.back() = parent;
    merge();
  }
}

// The cover of disjoint nodes, in any order.
NodeSet cover(std::vector<TreeNode> nodes);

// Whether a leaf is in the set.
bool contains(const NodeSet& set, int leaf);

// The cover of the union of two disjoint sets.
NodeSet unite(const NodeSet& a, const NodeSet& b);

}  // namespace treeattn::plan
