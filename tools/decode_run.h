// SPDX-License-Identifier: Apache-2.0
// One decode benchmark on the ranks of a communicator: the same call by every strategy, timed, counted and checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "device_option.h"
#include "options.h"
#include "treeattn/communicator.h"
#include "treeattn/order.h"
#include "treeattn/parallel_attention.h"
#include "treeattn/strategy.h"

namespace treeattn::tools {

struct DecodeSetup {
  Shape shape;
  ReductionOrder order;
  std::vector<Strategy> strategies;
  Device device;
  DeviceLink link = DeviceLink::kHost;  // other than that: with GPUs only
  bool canonical = true;                // ParallelOptions::canonical
  int threads = 1;                      // of a rank
  int repeat = 0;                       // 0: as many as fit into a second
  std::uint64_t seed = 1;
  bool quick = false;

  // Whether a strategy has the bits of one rank. The ring has them in any order.
  bool promises_bits(Strategy strategy) const {
    return same_bits(strategy) && (canonical || strategy == Strategy::kRing);
  }
};

// One strategy. docs/cli.md explains the figures.
struct DecodeLine {
  Strategy strategy = Strategy::kMerge;
  Strategy chosen = Strategy::kMerge;  // the one that ran
  double ms = 0;
  double reduce_ms = 0;
  std::uint64_t steps = 0;
  std::uint64_t bytes = 0;  // of all ranks, and so the next two
  std::uint64_t formula_bytes = 0;
  std::uint64_t remote_bytes = 0;
  double paper_bytes = 0;  // of one rank
  std::size_t peak_bytes = 0;
  std::size_t formula_peak_bytes = 0;
  std::uint64_t out_hash = 0;
  double max_error = 0;
};

struct DecodeResult {
  std::string transport;
  std::string device;  // of rank 0
  int ranks = 0;
  int hosts = 0;
  std::vector<DecodeLine> lines;
  std::vector<std::string> failures;  // checks that did not hold
  std::vector<std::string> skipped;   // strategies there is no memory for, and why
  std::string why;                    // of kAuto, if it ran

  // Null if it was not measured.
  const DecodeLine* find(Strategy strategy) const;
};

// Collective. The same result on every rank.
DecodeResult run_decode(const std::shared_ptr<Communicator>& world, const DecodeSetup& setup);

}  // namespace treeattn::tools
