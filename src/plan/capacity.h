// SPDX-License-Identifier: Apache-2.0
// Does it fit, and how fast is it: bytes and time of one decoding step of a model whose KV cache is spread over
// devices.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "plan/cluster.h"
#include "treeattn/order.h"

namespace treeattn::plan {

// A decoder as far as bytes and operations go.
struct ModelSize {
  std::int64_t layers = 0;
  std::int64_t hidden = 0;
  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t feed_forward = 0;
  std::int64_t vocab = 0;
  std::uint64_t weight_bytes = 0;       // of one copy
  std::uint64_t read_weight_bytes = 0;  // of these, read in every step: a table that is only looked up is not
  std::int64_t read_weights = 0;        // as many multiply-adds a token
  std::uint64_t kv_row_bytes = 0;       // K or V of one token and one KV head in one layer, scale included

  std::uint64_t token_bytes() const {  // K and V of one token in one layer
    return 2 * static_cast<std::uint64_t>(kv_heads) * kv_row_bytes;
  }
};

inline constexpr int kMostDevices = 4096;

struct CapacityRequest {
  ModelSize model;
  std::int64_t context = 0;  // tokens of a sequence
  std::int64_t batch = 1;    // sequences
  Cluster cluster;           // as many nodes of it as are needed
  int most_devices = kMostDevices;
  double usable = 0.9;         // of a device's memory: the rest is the driver's and the runtime's
  bool split_weights = false;  // cut over the devices of a node; else every device has a copy
  std::int64_t chunk_tokens = ReductionOrder().chunk_tokens;

  std::uint64_t usable_bytes() const { return static_cast<std::uint64_t>(usable * cluster.device_memory_bytes); }
};

// What the fullest device holds.
struct DeviceBytes {
  std::uint64_t weights = 0;
  std::uint64_t kv = 0;         // whole pages
  std::uint64_t states = 0;     // of its leaves and its nodes of the tree, and of the largest message
  std::uint64_t workspace = 0;  // activations of one step; for the ring, another share of a layer's K and V
  std::uint64_t total() const { return weights + kv + states + workspace; }
};

// One decoding step: a token for every sequence.
struct StepTime {
  double weights = 0;        // reading them, or multiplying by them
  double kv = 0;             // the slowest device's attention, a launch a layer included
  double exchange = 0;       // of states (ring: of K and V, as far as attention does not hide it)
  double split_weights = 0;  // allreduces that split weights need
  double total() const { return weights + kv + exchange + split_weights; }
};

struct StrategyPlan {
  Strategy strategy = Strategy::kMerge;
  DeviceBytes bytes;
  StepTime seconds;
  Cost layer;  // of one layer's exchange, attention included
  bool fits = false;
};

// The canonical order for so many devices: cyclic, so that no device grows alone, with a leaf for each.
ReductionOrder order_for(const CapacityRequest& request, int devices);

// Any strategy but kAuto.
StrategyPlan plan_strategy(const CapacityRequest& request, int devices, Strategy strategy);
// All that promise the same bits: those that fit first, and of these the fastest first.
std::vector<StrategyPlan> plan_strategies(const CapacityRequest& request, int devices);

// Whether `devices` devices hold it, by kMerge.
bool fits(const CapacityRequest& request, int devices);
// So many fit and one less does not. None: not even most_devices do.
std::optional<int> fewest_devices(const CapacityRequest& request);
// The largest context that fits on so many devices, request.context apart. 0: none does.
std::int64_t longest_context(const CapacityRequest& request, int devices);

}  // namespace treeattn::plan
