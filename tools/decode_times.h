// SPDX-License-Identifier: Apache-2.0
// How long a decoding step takes on a cluster: from the simulator (`treeattn simulate`), or where that cannot be had
// from the closed form of the cost model. Every time says which.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "outcome.h"
#include "treeattn/dtype.h"
#include "treeattn/strategy.h"

namespace treeattn::tools {

// One decoding step. The shape is the paper's unless said: one query, 16 heads of 128, bfloat16.
struct DecodePoint {
  std::string cluster = "dgx-h100";
  // Added to its description, such as "slow_device = 3 2\n"; a key that is in both has this value.
  std::string cluster_lines;
  int ranks = 1;
  int ranks_per_node = 8;
  Strategy strategy = Strategy::kMerge;
  std::int64_t tokens = 0;  // of a sequence
  std::int64_t heads = 16;
  std::int64_t kv_heads = 16;
  std::int64_t head_dim = 128;
  std::int64_t batch = 1;
  std::int64_t queries = 1;
  DType dtype = DType::kBFloat16;
  double overhead_us = 0;  // added to a call, whatever the strategy
};

// Of the paper's shape; what a figure's axis counts is a double.
DecodePoint decode_point(double ranks, double tokens);

struct DecodeTime {
  double us = 0;
  double local_us = 0;   // the slowest rank's attention to what it carries; ring: to all there is
  double reduce_us = 0;  // the rest
  double steps = 0;
  double bytes_per_rank = 0;
  double closed_form_us = 0;
  Source source = Source::kClosedForm;
};

// By the cost model alone: the closed form of what would be simulated. Knows no slow devices and links.
DecodeTime closed_form(const DecodePoint& point);

// Asks for every point once.
class DecodeTimes {
 public:
  // Hears what is being simulated, many times while that lasts.
  using Listener = std::function<void(const std::string& what)>;

  // simulator: the program beside `treeattn` that simulates; none: closed form only.
  DecodeTimes(std::filesystem::path simulator, Listener listener)
      : simulator_(std::move(simulator)), listener_(std::move(listener)) {}

  bool can_simulate() const { return !simulator_.empty(); }
  // Simulated where the ranks are few enough for that to be quick. Throws Error when a simulation fails.
  DecodeTime at(const DecodePoint& point);

  // How far simulated times lie from the closed form, relative to it, at most; clusters with slow parts apart. None:
  // nothing was simulated since the last call.
  std::optional<double> take_largest_distance() { return std::exchange(largest_distance_, std::nullopt); }

 private:
  DecodeTime simulate(const DecodePoint& point);

  std::filesystem::path simulator_;
  Listener listener_;
  std::map<std::string, DecodeTime> known_;  // by job
  std::optional<double> largest_distance_;
};

}  // namespace treeattn::tools
