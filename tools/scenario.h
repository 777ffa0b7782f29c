// SPDX-License-Identifier: Apache-2.0
// A decoding step on a described cluster: shares, sizes and its closed form. All simulated ranks know one: they live in
// one process, and at thousands of them a copy each of what a real rank holds for itself would not fit.
#pragma once

#include <cstdint>
#include <vector>

#include "attention_model.h"
#include "parallel/reduce.h"
#include "plan/cluster.h"
#include "plan/schedule.h"
#include "simulation_job.h"

namespace treeattn::tools {

class Scenario {
 public:
  explicit Scenario(SimulationJob job);

  const SimulationJob& job() const { return job_; }
  const plan::Cluster& cluster() const { return cluster_; }
  const plan::Network& network() const { return network_; }
  const plan::Shares& shares() const { return shares_; }
  const AttentionModel& attention() const { return attention_; }
  parallel::StateShape state_shape() const;

  // Before a measurement.
  void choose(Strategy strategy, std::int64_t tokens);
  Strategy strategy() const { return strategy_; }
  const plan::Schedule& schedule() const { return schedule_; }
  std::uint64_t kv_bytes(int rank) const { return kv_bytes_[static_cast<std::size_t>(rank)]; }
  std::uint64_t largest_share() const;
  // The slowest rank's attention to what it carries; ring: to all there is. Slow devices apart.
  double local_seconds() const;

  // The closed form of what is chosen, in seconds and bytes.
  plan::Cost closed_form() const;

 private:
  SimulationJob job_;
  plan::Cluster cluster_;
  plan::Network network_;
  plan::Shares shares_;
  AttentionModel attention_;
  Strategy strategy_ = Strategy::kMerge;
  plan::Schedule schedule_;
  std::vector<std::uint64_t> kv_bytes_;  // [ranks]
};

}  // namespace treeattn::tools
