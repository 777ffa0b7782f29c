// SPDX-License-Identifier: Apache-2.0
#include "scenario.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "treeattn/state.h"

namespace treeattn::tools {
namespace {

bool has_schedule(Strategy strategy) {
  return strategy == Strategy::kMerge || strategy == Strategy::kButterfly || strategy == Strategy::kGather ||
         strategy == Strategy::kTwoLevel;
}

std::uint64_t wide(int number) { return static_cast<std::uint64_t>(number); }

}  // namespace

Scenario::Scenario(SimulationJob job)
    : job_(std::move(job)),
      cluster_(plan::parse_cluster(job_.cluster, job_.origin)),
      network_(cluster_.network(job_.ranks, job_.ranks_per_node)),
      shares_(plan::Shares::weighted(job_.branches, plan::ranks_by_node(network_.node_of_rank), {})),
      attention_(cluster_, job_.shape) {
  // States are merged as they arrive, by the kernel that waits for them: the simulated reducers take no time for it.
  network_.merge_bytes_per_s = std::numeric_limits<double>::infinity();
}

parallel::StateShape Scenario::state_shape() const {
  const Shape& shape = job_.shape;
  return {static_cast<std::size_t>(shape.batch * shape.queries * shape.heads), state_floats(shape.head_dim)};
}

void Scenario::choose(Strategy strategy, std::int64_t tokens) {
  strategy_ = strategy;
  schedule_ = has_schedule(strategy) ? plan::make_schedule(strategy, network_.node_of_rank) : plan::Schedule();
  Shape token = job_.shape;
  token.tokens = 1;  // of every sequence
  // Tokens are spread evenly over the leaves.
  const auto tokens_before = [&](int leaf) {
    return static_cast<std::uint64_t>(tokens) * wide(leaf) / wide(job_.branches);
  };
  kv_bytes_.assign(static_cast<std::size_t>(job_.ranks), 0);
  for (int leaf = 0; leaf < job_.branches; ++leaf) {
    const std::uint64_t here = tokens_before(leaf + 1) - tokens_before(leaf);
    kv_bytes_[static_cast<std::size_t>(shares_.rank_of(leaf))] += here * token.cache_bytes();
  }
}

std::uint64_t Scenario::largest_share() const { return *std::max_element(kv_bytes_.begin(), kv_bytes_.end()); }

double Scenario::local_seconds() const {
  if (strategy_ != Strategy::kRing) return attention_.call_seconds(largest_share());
  double sum = 0;
  for (const std::uint64_t share : kv_bytes_) sum += attention_.call_seconds(share);
  return sum;
}

plan::Cost Scenario::closed_form() const {
  plan::ReductionSize size;
  size.rows = static_cast<std::int64_t>(state_shape().rows);
  size.v_dim = job_.shape.head_dim;
  size.kv_bytes_of_rank = kv_bytes_;
  size.attention_bytes_per_s = attention_.kv_bytes_per_s();
  size.launch_s = cluster_.launch_s;
  plan::Cost cost = plan::cost_of(strategy_, network_, shares_, size, job_.canonical);
  cost.seconds += job_.overhead_s;
  return cost;
}

}  // namespace treeattn::tools
