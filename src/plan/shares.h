// SPDX-License-Identifier: Apache-2.0
// Which rank carries which leaf of the canonical tree.
#pragma once

#include <span>
#include <vector>

#include "plan/node_set.h"

namespace treeattn::plan {

class Shares {
 public:
  // Contiguous ranges of leaves in proportion to the weights (empty: equal), handed out node by node (of the cluster)
  // in the order of `ranks_by_node`. Requires weights of ranks.size() finite values, 0 or more, not all 0.
  static Shares weighted(int branches, std::span<const int> ranks_by_node, std::span<const double> weights);
  // Any assignment: rank_of_leaf[leaf] in [0, ranks).
  Shares(int ranks, std::vector<int> rank_of_leaf);

  int ranks() const { return static_cast<int>(nodes_.size()); }
  int branches() const { return static_cast<int>(rank_of_leaf_.size()); }
  int rank_of(int leaf) const { return rank_of_leaf_[static_cast<std::size_t>(leaf)]; }
  const std::vector<int>& rank_of_leaf() const { return rank_of_leaf_; }
  // Ascending.
  std::vector<int> leaves_of(int rank) const;
  const NodeSet& nodes_of(int rank) const { return nodes_[static_cast<std::size_t>(rank)]; }

  bool operator==(const Shares&) const = default;

 private:
  std::vector<int> rank_of_leaf_;
  std::vector<NodeSet> nodes_;  // [ranks]
};

// Ranks ordered by the node (of the cluster) they are on, then by rank.
std::vector<int> ranks_by_node(std::span<const int> node_of_rank);

}  // namespace treeattn::plan
