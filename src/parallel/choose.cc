// SPDX-License-Identifier: Apache-2.0
#include "parallel/choose.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "base/sent.h"
#include "base/timing.h"
#include "parallel/agree.h"
#include "parallel/tree_attention.h"

namespace treeattn::parallel {
namespace {

using base::Clock, base::median, base::seconds_since;

// Half of a round trip between ranks a and b, in seconds; on any other rank nothing happens.
double half_round_trip(Communicator& comm, int a, int b, std::size_t bytes, int repeats) {
  if (comm.rank() != a && comm.rank() != b) return 0;
  const SharedBuffer memory = make_shared_buffer((bytes + sizeof(float) - 1) / sizeof(float));
  std::fill_n(memory->as<std::byte>(), memory->bytes(), std::byte{0});
  const std::span<std::byte> data(memory->as<std::byte>(), bytes);
  const int peer = comm.rank() == a ? b : a;
  const auto ship = [&](bool out) {
    Request request = out ? comm.send_in_call(peer, data, memory) : comm.receive_in_call(peer, data, memory);
    comm.wait(request);
  };
  std::vector<double> times;
  for (int i = 0; i < repeats; ++i) {
    const auto start = Clock::now();
    ship(comm.rank() == a);
    ship(comm.rank() != a);
    times.push_back(seconds_since(start) / 2);
  }
  return median(std::move(times));
}

plan::Link measure_link(Communicator& comm, int a, int b) {
  constexpr std::size_t kSmall = 8;
  constexpr std::size_t kMost = std::size_t{4} << 20;
  constexpr double kLongEnough = 0.01;  // seconds: buffers on the way let a short message pass faster than the link is
  std::size_t bytes = std::size_t{256} << 10;
  half_round_trip(comm, a, b, bytes, 1);  // connections are made by the first message
  plan::Link link;
  link.latency_s = half_round_trip(comm, a, b, kSmall, 21);
  for (;; bytes *= 4) {
    double time = half_round_trip(comm, a, b, bytes, 5);
    comm.broadcast(std::as_writable_bytes(std::span(&time, 1)), a);
    base::require_sent(std::isfinite(time) && time >= 0, a, "{} s for a message; accepted: 0 or more, finite", time);
    link.bytes_per_s = static_cast<double>(bytes) / std::max(time - link.latency_s, time / 100);
    if (bytes >= kMost || time >= kLongEnough) break;
  }
  comm.broadcast(std::as_writable_bytes(std::span(&link, 1)), a);
  base::require_sent(std::isfinite(link.latency_s) && link.latency_s >= 0 && link.bytes_per_s > 0, a,
                     "a link of {} s and {} bytes/s; accepted: 0 or more, and more than 0", link.latency_s,
                     link.bytes_per_s);
  return link;
}

// The first two ranks of one node, or of two nodes.
std::optional<std::pair<int, int>> find_pair(const Communicator& comm, bool same_node) {
  for (int a = 0; a < comm.size(); ++a) {
    for (int b = a + 1; b < comm.size(); ++b) {
      if ((comm.node_of(a) == comm.node_of(b)) == same_node) return std::pair{a, b};
    }
  }
  return {};
}

// The slowest rank's time of one reduction, the same number on every rank.
double try_out(Strategy strategy, const plan::Schedule& schedule, Communicator& comm, const Trial& trial, int repeats) {
  std::vector<double> times;
  for (int i = 0; i < repeats; ++i) times.push_back(trial(strategy, schedule));
  return largest_of_ranks(comm, median(std::move(times)));
}

std::string link_text(const char* name, const plan::Link& link) {
  if (std::isinf(link.bytes_per_s)) return fmt::format("{}: none\n", name);
  return fmt::format("{}: {:.1f} us, {:.3g} GB/s\n", name, 1e6 * link.latency_s, 1e-9 * link.bytes_per_s);
}

}  // namespace

plan::Network measure_links(Communicator& comm) {
  plan::Network network;
  network.node_of_rank = comm.node_of_rank();
  if (const auto pair = find_pair(comm, true)) network.local = measure_link(comm, pair->first, pair->second);
  if (const auto pair = find_pair(comm, false)) network.remote = measure_link(comm, pair->first, pair->second);
  return network;
}

Trial trial_by_host(const ReduceContext& context, StateShape shape) {
  return [context, shape](Strategy strategy, const plan::Schedule& schedule) {
    const std::size_t floats = context.shares.nodes_of(context.communicator.rank()).size() * shape.block_floats();
    SharedBuffer own = make_shared_buffer(floats);
    std::fill_n(own->as<float>(), floats, 1.0f);
    context.communicator.barrier();
    const auto start = Clock::now();
    reduce_states(strategy, schedule, context, shape, std::move(own));
    return seconds_since(start);
  };
}

Choice choose_strategy(const ReduceContext& context, const plan::Network* network, const plan::ReductionSize& size,
                       const Trial& trial) {
  // What the model cannot tell apart is measured: it knows nothing of cores that ranks share, or of other traffic.
  constexpr double kClose = 4;
  constexpr int kWarmUp = 2, kRepeats = 9;
  Communicator& comm = context.communicator;
  const plan::Network unknown{.local = {}, .remote = {}, .node_of_rank = comm.node_of_rank()};
  const auto ranked =
      plan::rank_strategies(network != nullptr ? *network : unknown, context.shares, size, context.canonical);
  double modelled = std::numeric_limits<double>::infinity();
  for (const auto& [strategy, cost] : ranked) {
    if (strategy != Strategy::kRing) modelled = std::min(modelled, cost.seconds);
  }
  std::map<Strategy, double> measured;
  Choice choice;
  double best = std::numeric_limits<double>::infinity();
  for (const auto& [strategy, cost] : ranked) {
    if (strategy == Strategy::kRing) continue;
    if (network != nullptr && cost.seconds > kClose * modelled) continue;
    const plan::Schedule schedule = plan::make_schedule(strategy, comm.node_of_rank()).seen_by(comm.rank());
    try_out(strategy, schedule, comm, trial, kWarmUp);
    const double seconds = try_out(strategy, schedule, comm, trial, kRepeats);
    measured[strategy] = seconds;
    if (seconds < best) {
      best = seconds;
      choice.strategy = strategy;
    }
  }
  if (network != nullptr) {
    choice.why = link_text("inside a node", network->local) + link_text("between nodes", network->remote);
  }
  choice.why +=
      fmt::format("{:<12}{:>6}{:>14}{:>14}{:>14}\n", "strategy", "steps", "bytes sent", "model us", "measured us");
  const auto microseconds = [](const double* seconds) {
    return seconds != nullptr ? fmt::format("{:.1f}", 1e6 * *seconds) : "-";
  };
  for (const auto& [strategy, cost] : ranked) {
    const auto found = measured.find(strategy);
    choice.why += fmt::format("{:<12}{:>6}{:>14}{:>14}{:>14}{}\n", strategy_name(strategy), cost.steps, cost.bytes,
                              microseconds(network != nullptr ? &cost.seconds : nullptr),
                              microseconds(found != measured.end() ? &found->second : nullptr),
                              strategy == choice.strategy ? "  <- chosen" : "");
  }
  return choice;
}

}  // namespace treeattn::parallel
