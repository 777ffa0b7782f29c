// SPDX-License-Identifier: Apache-2.0
// A cluster as numbers: its devices, the links inside a node and between nodes. Three are built in; others are read
// from a small text file, which docs/simulation.md describes:
//
//   # comment
//   name             = two-boxes
//   devices_per_node = 2
//   device_memory    = 24 GB
//   device_rate      = 1.008 TB/s
//   local_latency    = 5 us
//   ...
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "plan/cost.h"

namespace treeattn::plan {

// One rank or one node that is slower than the others.
struct Slower {
  int index = 0;      // of the rank or the node
  double factor = 1;  // its rate is divided by this
};
inline constexpr double kMostFactor = 1e6;  // of a slower one

struct Cluster {
  std::string name;
  int devices_per_node = 0;
  int adapters_per_node = 0;             // remote links of a node; a message uses one
  double device_memory_bytes = 0;        // of one device
  double device_bytes_per_s = 0;         // how fast attention reads K and V
  double device_flops_per_s = 0;         // matrix products of 16 bits
  double launch_s = 0;                   // before every piece of local work
  double merge_bytes_per_s = 0;          // how fast received states are merged
  Link local;                            // between two devices of a node, each way
  Link remote;                           // one adapter, each way
  double local_shared_bytes_per_s = 0;   // all messages inside a node together; 0: they do not disturb each other
  double remote_shared_bytes_per_s = 0;  // all messages between nodes together; 0: they do not disturb each other
  std::vector<Slower> slow_devices;      // by rank: its local work
  std::vector<Slower> slow_local;        // by rank: its link inside the node
  std::vector<Slower> slow_remote;       // by node: its adapters

  // What the closed form knows of it: nodes are filled one after the other, with ranks_per_node ranks each. Shared
  // links and slow ones are not in it: they are what a simulation adds.
  Network network(int ranks, int ranks_per_node) const;
};

// "dgx-h100", "mi300x" and "rtx4090".
std::span<const std::string_view> built_in_clusters();
// The text of one of them, in the format of a file. Throws InvalidArgument.
std::string_view built_in_cluster_text(std::string_view name);

// The text of a built-in cluster by name, or else of a file. Throws InvalidArgument for neither, BadFile.
std::string cluster_text(const std::string& name_or_path);
// Throws BadFile with the line, the value and what is accepted. `origin` is what the message calls the text.
Cluster parse_cluster(std::string_view text, std::string_view origin);
// Both in one.
Cluster find_cluster(const std::string& name_or_path);

}  // namespace treeattn::plan
