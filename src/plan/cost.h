// SPDX-License-Identifier: Apache-2.0
// What a reduction costs: steps, bytes and time of every strategy from latency and bandwidth of two levels, and the
// paper's equations for memory and communication volume.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "plan/schedule.h"

namespace treeattn::plan {

// Time of a message of n bytes: latency + n / bandwidth.
struct Link {
  double latency_s = 0;
  double bytes_per_s = std::numeric_limits<double>::infinity();
};

struct Network {
  Link local;                          // between ranks of one node
  Link remote;                         // between nodes: one adapter
  std::vector<int> node_of_rank = {};  // [ranks] 0 or more, less than ranks
  double merge_bytes_per_s = 4e9;      // how fast a rank merges the states it receives
  int adapters_per_node = 1;           // remote links of a node; a message uses one, all messages of a node share them
};

// The sizes that matter.
struct ReductionSize {
  std::int64_t rows = 0;  // batch * queries * heads
  std::int64_t v_dim = 0;
  // Bytes of K and V (scales included) that each rank carries, and how fast they are worked on. The ring sends them, so
  // it asks for them; elsewhere empty means that local work costs nothing.
  std::vector<std::uint64_t> kv_bytes_of_rank = {};
  double attention_bytes_per_s = 0;  // 0: local work costs nothing
  double launch_s = 0;               // before the work on each share

  std::uint64_t state_bytes() const { return static_cast<std::uint64_t>(rows * (v_dim + 2)) * sizeof(float); }
};

struct Cost {
  std::uint64_t steps = 0;
  std::uint64_t messages = 0;      // of all ranks
  std::uint64_t bytes = 0;         // of all ranks
  std::uint64_t remote_bytes = 0;  // of these, between nodes
  double seconds = 0;              // until the last rank has the result, its local work included
};

// Any strategy but kAuto. steps, messages and bytes are what the reducers will count; seconds is a model:
// - Every rank first works on what it carries; the slowest ends this phase.
// - Messages of a round go at the same time, and the round ends with its slowest message: latency + bytes / bandwidth,
//   and the merge at its receiver. Messages that leave one node, or enter it, share its adapters.
// - kPaper and kTwoPhase: trees over the ranks in order of rank, a message for every rank, empty or not. On the way
//   down a rank sends to all its children at once, so that these messages share its link.
// - kRing: a rank sends to the next one in the order of the nodes. A step lasts as long as its slowest message or the
//   work on the largest share, whichever takes longer; the last share that comes is worked on after the last step.
//   Empty shares are not sent.
Cost cost_of(Strategy strategy, const Network& network, const Shares& shares, const ReductionSize& size,
             bool canonical = true);

// The strategies that promise the same bits, fastest first: what kAuto chooses from.
std::vector<std::pair<Strategy, Cost>> rank_strategies(const Network& network, const Shares& shares,
                                                       const ReductionSize& size, bool canonical = true);

// Closed forms of Cost::bytes, what all ranks send together, n bytes a state. They hold where every set of leaves that
// is sent is one node of the tree (p a power of two, equal shares, for two_level also equal nodes of a power of two),
// and with canonical == false for any shares of which none is empty. Other shares add nodes: docs/strategies.md.
std::uint64_t allreduce_bytes(int ranks, std::uint64_t bytes);                     // 2 (p - 1) n
std::uint64_t tree_decode_bytes(int ranks, const ReductionSize& size);             // paper, two_phase, merge, two_level
std::uint64_t gather_decode_bytes(int ranks, const ReductionSize& size);           // p (p - 1) n
std::uint64_t ring_decode_bytes(std::span<const std::uint64_t> kv_bytes_of_rank);  // (p - 1) * all of K and V
// p log2 p n for a power of two; else, with the largest power of two q below p, q log2 q n + 2 (p - q) n.
std::uint64_t butterfly_decode_bytes(int ranks, const ReductionSize& size);
// Of Cost::remote_bytes, by two_level: 2 (nodes - 1) n.
std::uint64_t two_level_remote_bytes(int nodes, const ReductionSize& size);

// The paper's equations, in elements. b sequences of t = N / p tokens a rank, d = heads * head_dim.
namespace paper {
double ring_peak_memory(double b, double t, double d);                // 4btd + 2bd
double tree_peak_memory(double b, double t, double d, double heads);  // 2btd + 2bd + 2b n_h
double ring_volume(double b, double t, double d, double p);           // 2btd p: all ranks, one step of the ring
double tree_volume(double b, double d, double heads, double p);       // 2 (p - 1) / p (bd + 2b n_h): one rank
}  // namespace paper

}  // namespace treeattn::plan
