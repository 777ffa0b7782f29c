// SPDX-License-Identifier: Apache-2.0
// What `treeattn simulate` asks the simulator for, and what comes back: JSON between two programs, because SimGrid's
// MPI and a real one have the same names and cannot be linked into one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "options.h"
#include "treeattn/strategy.h"

namespace treeattn::tools {

// The simulator: a program beside this one.
inline constexpr const char* kSimulator = "treeattn-sim";

// One cluster and one number of ranks; every strategy at every length.
struct SimulationJob {
  std::string cluster;  // text, as a file holds it
  std::string origin;   // what error messages call that text
  int ranks = 1;
  int ranks_per_node = 1;
  Shape shape;                       // its tokens are not used
  std::vector<std::int64_t> tokens;  // of all ranks together
  std::vector<Strategy> strategies;
  int branches = 256;
  bool canonical = true;
  double overhead_s = 0;  // of every call, before anything else

  std::string to_json() const;
  static SimulationJob from_json(const std::string& text);
};

// One strategy at one length. Simulated microseconds.
struct SimulationLine {
  Strategy strategy = Strategy::kMerge;
  std::int64_t tokens = 0;
  double us = 0;        // until the last rank has the result
  double local_us = 0;  // of these, the slowest rank's attention to what it carries; ring: to all there is
  std::uint64_t steps = 0;
  std::uint64_t messages = 0;      // of all ranks
  std::uint64_t bytes = 0;         // of all ranks
  std::uint64_t remote_bytes = 0;  // of all ranks
  std::uint64_t device_bytes = 0;  // what the largest rank holds at its peak
  double closed_form_us = 0;
  std::uint64_t closed_form_bytes = 0;
  std::string failure;  // what does not hold; empty when all is well
  double wall_s = 0;    // how long the simulation itself took

  std::string to_json() const;
  static SimulationLine from_json(const std::string& text);
};

}  // namespace treeattn::tools
