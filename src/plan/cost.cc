// SPDX-License-Identifier: Apache-2.0
#include "plan/cost.h"

#include <algorithm>
#include <bit>
#include <initializer_list>
#include <numeric>

#include "base/check.h"
#include "base/counting.h"

namespace treeattn::plan {
namespace {

using base::require;

struct Transfer {
  int from = 0;
  int to = 0;
  std::uint64_t bytes = 0;
  bool merged = false;  // by the receiver, rather than taken over
};

void check(const Network& network, const Shares& shares, const ReductionSize& size) {
  const int ranks = shares.ranks();
  require(network.node_of_rank.size() == static_cast<std::size_t>(ranks), "node_of_rank holds {} values; accepted: {}",
          network.node_of_rank.size(), ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    const int node = network.node_of_rank[static_cast<std::size_t>(rank)];
    require(node >= 0 && node < ranks, "rank {} is on node {}; accepted: 0 to {}", rank, node, ranks - 1);
  }
  for (const Link& link : {network.local, network.remote}) {
    require(link.latency_s >= 0, "latency_s = {}; accepted: 0 or more", link.latency_s);
    require(link.bytes_per_s > 0, "bytes_per_s = {}; accepted: more than 0", link.bytes_per_s);
  }
  require(network.adapters_per_node > 0, "adapters_per_node = {}; accepted: 1 or more", network.adapters_per_node);
  require(network.merge_bytes_per_s > 0, "merge_bytes_per_s = {}; accepted: more than 0", network.merge_bytes_per_s);
  require(size.rows > 0, "rows = {}; accepted: 1 or more", size.rows);
  require(size.v_dim > 0, "v_dim = {}; accepted: 1 or more", size.v_dim);
  require(size.kv_bytes_of_rank.empty() || size.kv_bytes_of_rank.size() == static_cast<std::size_t>(ranks),
          "kv_bytes_of_rank holds {} values; accepted: none or one per rank, {}", size.kv_bytes_of_rank.size(), ranks);
  require(size.attention_bytes_per_s >= 0, "attention_bytes_per_s = {}; accepted: 0 or more",
          size.attention_bytes_per_s);
  require(size.launch_s >= 0, "launch_s = {}; accepted: 0 or more", size.launch_s);
}

double seconds_at(std::uint64_t bytes, double bytes_per_s) { return static_cast<double>(bytes) / bytes_per_s; }

// Attention to the largest share.
double slowest_work(const ReductionSize& size) {
  if (size.kv_bytes_of_rank.empty() || size.attention_bytes_per_s == 0) return 0;
  const std::uint64_t largest = *std::max_element(size.kv_bytes_of_rank.begin(), size.kv_bytes_of_rank.end());
  return size.launch_s + seconds_at(largest, size.attention_bytes_per_s);
}

// Adds up rounds.
class Tally {
 public:
  Tally(const Network& network, double local_work)
      : network_(network), leaving_(network.node_of_rank.size()), entering_(network.node_of_rank.size()) {
    cost_.seconds = local_work;
  }

  // `work` seconds go on beside the messages.
  void add_round(std::span<const Transfer> transfers, double work = 0) {
    std::fill(leaving_.begin(), leaving_.end(), 0);
    std::fill(entering_.begin(), entering_.end(), 0);
    for (const Transfer& transfer : transfers) count(transfer);
    double slowest = work;
    for (const Transfer& transfer : transfers) slowest = std::max(slowest, seconds_of(transfer));
    ++cost_.steps;
    cost_.seconds += slowest;
  }

  // From the root to everybody, the messages of a sender after the one it received. All that a rank sends leave at
  // once, as soon as it has the result, and share its link.
  void add_way_down(std::span<const Transfer> transfers, std::size_t rounds) {
    const auto ranks = network_.node_of_rank.size();
    std::vector<double> has_result(ranks, 0);
    std::vector<double> local(ranks, 0), remote(ranks, 0);  // bytes that leave a rank
    const auto leaving = [&](const Transfer& transfer) -> double& {
      return (is_local(transfer) ? local : remote)[static_cast<std::size_t>(transfer.from)];
    };
    for (const Transfer& transfer : transfers) {
      count(transfer);
      leaving(transfer) += static_cast<double>(transfer.bytes);
    }
    double end = 0;
    for (const Transfer& transfer : transfers) {
      const Link& link = is_local(transfer) ? network_.local : network_.remote;
      double& there = has_result[static_cast<std::size_t>(transfer.to)];
      there = has_result[static_cast<std::size_t>(transfer.from)];
      if (transfer.bytes > 0) there += link.latency_s + leaving(transfer) / link.bytes_per_s;
      end = std::max(end, there);
    }
    cost_.steps += rounds;
    cost_.seconds += end;
  }

  const Cost& cost() const { return cost_; }

 private:
  std::size_t node(int rank) const {
    return static_cast<std::size_t>(network_.node_of_rank[static_cast<std::size_t>(rank)]);
  }

  bool is_local(const Transfer& transfer) const { return node(transfer.from) == node(transfer.to); }

  void count(const Transfer& transfer) {
    if (transfer.bytes == 0) return;
    ++cost_.messages;
    cost_.bytes += transfer.bytes;
    if (is_local(transfer)) return;
    cost_.remote_bytes += transfer.bytes;
    leaving_[node(transfer.from)] += transfer.bytes;
    entering_[node(transfer.to)] += transfer.bytes;
  }

  double seconds_of(const Transfer& transfer) const {
    if (transfer.bytes == 0) return 0;
    const double bytes = static_cast<double>(transfer.bytes);
    const double merge = transfer.merged ? bytes / network_.merge_bytes_per_s : 0;
    const Link& local = network_.local;
    if (is_local(transfer)) return local.latency_s + bytes / local.bytes_per_s + merge;
    const std::uint64_t busiest = std::max(leaving_[node(transfer.from)], entering_[node(transfer.to)]);
    const double shared = static_cast<double>(busiest) / network_.adapters_per_node;
    return network_.remote.latency_s + std::max(bytes, shared) / network_.remote.bytes_per_s + merge;
  }

  const Network& network_;
  std::vector<std::uint64_t> leaving_;   // [nodes] bytes of this round
  std::vector<std::uint64_t> entering_;  // [nodes]
  Cost cost_;
};

Cost scheduled_cost(Tally tally, const Schedule& schedule, std::span<const std::vector<std::size_t>> states,
                    std::uint64_t state_bytes) {
  std::vector<Transfer> transfers;
  for (std::size_t k = 0; k < schedule.rounds.size(); ++k) {
    transfers.clear();
    for (std::size_t i = 0; i < schedule.rounds[k].size(); ++i) {
      const Message& message = schedule.rounds[k][i];
      transfers.push_back({message.from, message.to, states[k][i] * state_bytes, message.payload != Payload::kResult});
    }
    tally.add_round(transfers);
  }
  return tally.cost();
}

// One after the other, of so many floats each, along a tree over the ranks in order of rank: Communicator::allreduce.
Cost allreduces_cost(Tally tally, int ranks, std::initializer_list<std::int64_t> floats) {
  const Schedule schedule = tree_schedule(base::counting(ranks));
  const std::size_t up = schedule.rounds.size() / 2;
  std::vector<Transfer> transfers;
  for (const std::int64_t count : floats) {
    const std::uint64_t bytes = static_cast<std::uint64_t>(count) * sizeof(float);
    transfers.clear();
    for (std::size_t k = 0; k < schedule.rounds.size(); ++k) {
      for (const Message& message : schedule.rounds[k]) {
        transfers.push_back({message.from, message.to, bytes, message.payload != Payload::kResult});
      }
      if (k >= up) continue;
      tally.add_round(transfers);
      transfers.clear();
    }
    tally.add_way_down(transfers, schedule.rounds.size() - up);
  }
  return tally.cost();
}

// Neighbours on the ring are neighbours in the cluster.
Cost ring_cost(Tally tally, std::span<const int> node_of_rank, const ReductionSize& size) {
  const std::size_t ranks = size.kv_bytes_of_rank.size();
  const std::vector<int> ring = ranks_by_node(node_of_rank);
  // In every step every share is at some rank, so the largest is worked on somewhere.
  const double work = slowest_work(size);
  std::vector<Transfer> transfers(ranks);
  for (std::size_t step = 0; step + 1 < ranks; ++step) {
    for (std::size_t i = 0; i < ranks; ++i) {
      const auto share = static_cast<std::size_t>(ring[(i + ranks - step) % ranks]);
      transfers[i] = {ring[i], ring[(i + 1) % ranks], size.kv_bytes_of_rank[share]};
    }
    tally.add_round(transfers, work);
  }
  return tally.cost();
}

std::uint64_t product(int a, int b, std::uint64_t bytes) {
  return static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b) * bytes;
}

}  // namespace

Cost cost_of(Strategy strategy, const Network& network, const Shares& shares, const ReductionSize& size,
             bool canonical) {
  check(network, shares, size);
  const Tally tally(network, slowest_work(size));
  switch (strategy) {
    case Strategy::kPaper:  // the maximum, the numerator, the denominator
      return allreduces_cost(tally, shares.ranks(), {size.rows, size.rows * size.v_dim, size.rows});
    case Strategy::kTwoPhase:
      return allreduces_cost(tally, shares.ranks(), {size.rows, size.rows * (size.v_dim + 1)});
    case Strategy::kRing:
      require(!size.kv_bytes_of_rank.empty(), "kv_bytes_of_rank is empty; the ring sends K and V: one value per rank");
      return ring_cost(tally, network.node_of_rank, size);
    case Strategy::kMerge:
    case Strategy::kButterfly:
    case Strategy::kGather:
    case Strategy::kTwoLevel: {
      const Schedule schedule = make_schedule(strategy, network.node_of_rank);
      return scheduled_cost(tally, schedule, states_of(schedule, shares, canonical), size.state_bytes());
    }
    case Strategy::kAuto:
      break;
  }
  base::throw_invalid("strategy {} has no cost; accepted: all but auto", strategy_name(strategy));
}

std::vector<std::pair<Strategy, Cost>> rank_strategies(const Network& network, const Shares& shares,
                                                       const ReductionSize& size, bool canonical) {
  std::vector<std::pair<Strategy, Cost>> ranked;
  for (const Strategy strategy : kAllStrategies) {
    if (same_bits(strategy)) ranked.emplace_back(strategy, cost_of(strategy, network, shares, size, canonical));
  }
  std::stable_sort(ranked.begin(), ranked.end(),
                   [](const auto& a, const auto& b) { return a.second.seconds < b.second.seconds; });
  return ranked;
}

std::uint64_t allreduce_bytes(int ranks, std::uint64_t bytes) { return product(2, ranks - 1, bytes); }

std::uint64_t tree_decode_bytes(int ranks, const ReductionSize& size) {
  return allreduce_bytes(ranks, size.state_bytes());
}

std::uint64_t butterfly_decode_bytes(int ranks, const ReductionSize& size) {
  const unsigned groups = std::bit_floor(static_cast<unsigned>(ranks));
  const int exchanging = static_cast<int>(groups);
  return product(exchanging, std::countr_zero(groups), size.state_bytes()) +
         product(2, ranks - exchanging, size.state_bytes());
}

std::uint64_t gather_decode_bytes(int ranks, const ReductionSize& size) {
  return product(ranks, ranks - 1, size.state_bytes());
}

std::uint64_t ring_decode_bytes(std::span<const std::uint64_t> kv_bytes_of_rank) {
  if (kv_bytes_of_rank.empty()) return 0;
  return (kv_bytes_of_rank.size() - 1) *
         std::accumulate(kv_bytes_of_rank.begin(), kv_bytes_of_rank.end(), std::uint64_t{0});
}

std::uint64_t two_level_remote_bytes(int nodes, const ReductionSize& size) {
  return allreduce_bytes(nodes, size.state_bytes());
}

namespace paper {

// Section "Memory cost", Mem_ring: q and its output, the shard of K and V, and the neighbour's shard coming in.
double ring_peak_memory(double b, double t, double d) { return 4 * b * t * d + 2 * b * d; }

// Section "Memory cost", Mem_tree: instead of the neighbour's shard, numerator, denominator and maximum.
double tree_peak_memory(double b, double t, double d, double heads) {
  return 2 * b * t * d + 2 * b * d + 2 * b * heads;
}

// Section "Communication volume", V_ring.
double ring_volume(double b, double t, double d, double p) { return 2 * b * t * d * p; }

// Section "Communication volume", V_Tree = V_Allreduce of numel(n, d, m) = bd + 2b n_h. That is the share of one rank,
// where all together send 2 (p - 1) numel: tree_decode_bytes.
double tree_volume(double b, double d, double heads, double p) { return 2 * (p - 1) / p * (b * d + 2 * b * heads); }

}  // namespace paper
}  // namespace treeattn::plan
