// SPDX-License-Identifier: Apache-2.0
// What a reduction costs: steps, bytes and time of every strategy from latency and bandwidth of two levels, and the
// paper's equations for memory and communication volume.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/schedule.h"

namespace treeattn::plan {

// Time of a message of n bytes: latency + n / bandwidth.
struct Link {
  double latency_s = 0;
  double bytes_per_s = 0;
};

struct Network {
  Link local;   // between ranks of one node
  Link remote;  // between nodes
  std::vector<int> node_of_rank;
  double merge_bytes_per_s = 4e9;  // how fast states are merged
};

// The sizes that matter.
struct ReductionSize {
  std::int64_t rows = 0;  // batch * queries * heads
  std::int64_t v_dim = 0;
  // For the ring: bytes of K and V (scales included) that each rank carries, and how fast they are worked on.
  std::vector<std::uint64_t> kv_bytes_of_rank;
  double attention_bytes_per_s = 0;  // 0: local work costs nothing

  std::uint64_t state_bytes() const { return static_cast<std::uint64_t>(rows * (v_dim + 2)) * sizeof(float); }
};

struct Cost {
  std::uint64_t steps = 0;
  std::uint64_t messages = 0;      // of all ranks
  std::uint64_t bytes = 0;         // of all ranks
  std::uint64_t remote_bytes = 0;  // of these, between nodes
  double seconds = 0;              // until the last rank has the result
};

// Any strategy but kAuto. Messages of a round go at the same time; those that leave or enter one node share its link.
Cost cost_of(Strategy strategy, const Network& network, const Shares& shares, const ReductionSize& size,
             bool canonical = true);

// Closed forms of Cost::bytes: what all ranks send together, where every rank's share is one node of the tree.
std::uint64_t allreduce_bytes(int ranks, std::uint64_t bytes);                     // 2 (p - 1) n
std::uint64_t tree_decode_bytes(int ranks, const ReductionSize& size);             // paper, two_phase, merge, two_level
std::uint64_t gather_decode_bytes(int ranks, const ReductionSize& size);           // p (p - 1) n
std::uint64_t ring_decode_bytes(std::span<const std::uint64_t> kv_bytes_of_rank);  // (p - 1) * all of K and V

// The paper's equations, in elements. b sequences of t = N / p tokens a rank, d = heads * head_dim.
namespace paper {
double ring_peak_memory(double b, double t, double d);                // 4btd + 2bd
double tree_peak_memory(double b, double t, double d, double heads);  // 2btd + 2bd + 2b n_h
double ring_volume(double b, double t, double d, double p);           // 2btd p: all ranks, one step of the ring
double tree_volume(double b, double d, double heads, double p);       // 2 (p - 1) / p (bd + 2b n_h): one rank
}  // namespace paper

}  // namespace treeattn::plan
