// SPDX-License-Identifier: Apache-2.0
#include "plan/shares.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/check.h"
#include "base/counting.h"

namespace treeattn::plan {

using base::require;

Shares::Shares(int ranks, std::vector<int> rank_of_leaf)
    : rank_of_leaf_(std::move(rank_of_leaf)), nodes_(static_cast<std::size_t>(ranks)) {
  for (int leaf = 0; leaf < branches(); ++leaf) {
    require(rank_of(leaf) >= 0 && rank_of(leaf) < ranks, "leaf {} belongs to rank {}; accepted: 0 to {}", leaf,
            rank_of(leaf), ranks - 1);
    append_node(nodes_[static_cast<std::size_t>(rank_of(leaf))], {0, leaf}, [] {});
  }
}

Shares Shares::weighted(int branches, std::span<const int> ranks_by_node, std::span<const double> weights) {
  const std::size_t ranks = ranks_by_node.size();
  require(branches > 0, "branches = {}; accepted: 1 or more", branches);
  require(ranks > 0, "ranks = {}; accepted: 1 or more", ranks);
  require(weights.empty() || weights.size() == ranks, "weights holds {} values; accepted: none or one per rank, {}",
          weights.size(), ranks);
  base::require_address("weights", weights);
  double total = 0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    require(std::isfinite(weights[i]) && weights[i] >= 0, "weights[{}] = {}; accepted: 0 or more, finite", i,
            weights[i]);
    total += weights[i];
  }
  require(weights.empty() || (total > 0 && std::isfinite(total)), "weights add up to {}; accepted: more than 0, finite",
          total);
  // Rounding the running sum, not each share, keeps every boundary within half a leaf of where it should be.
  std::vector<int> rank_of_leaf(static_cast<std::size_t>(branches));
  double sum = 0;
  int leaf = 0;
  int last_used = 0;
  for (std::size_t i = 0; i < ranks; ++i) {
    const int rank = ranks_by_node[i];
    const double weight = weights.empty() ? 1.0 : weights[static_cast<std::size_t>(rank)];
    sum += weight;
    const double part = sum / (weights.empty() ? static_cast<double>(ranks) : total);
    const int end = std::min(branches, static_cast<int>(std::floor(part * branches + 0.5)));
    if (weight > 0) last_used = rank;
    while (leaf < end) rank_of_leaf[static_cast<std::size_t>(leaf++)] = rank;
  }
  while (leaf < branches) rank_of_leaf[static_cast<std::size_t>(leaf++)] = last_used;
  return Shares(static_cast<int>(ranks), std::move(rank_of_leaf));
}

std::vector<int> Shares::leaves_of(int rank) const {
  std::vector<int> leaves;
  for (int leaf = 0; leaf < branches(); ++leaf) {
    if (rank_of(leaf) == rank) leaves.push_back(leaf);
  }
  return leaves;
}

std::vector<int> ranks_by_node(std::span<const int> node_of_rank) {
  std::vector<int> ranks = base::counting(static_cast<int>(node_of_rank.size()));
  std::stable_sort(ranks.begin(), ranks.end(), [&](int a, int b) {
    return node_of_rank[static_cast<std::size_t>(a)] < node_of_rank[static_cast<std::size_t>(b)];
  });
  return ranks;
}

}  // namespace treeattn::plan
