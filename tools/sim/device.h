// SPDX-License-Identifier: Apache-2.0
// A device that is only modelled: work takes time, memory is counted, and nothing is computed or allocated.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "options.h"
#include "plan/cluster.h"

namespace treeattn::tools {

// How long attention to K and V takes, as bytes read by the device: what it waits for, memory or products.
class AttentionModel {
 public:
  AttentionModel(const plan::Cluster& cluster, const Shape& shape);

  // One call that attends to so many bytes of K and V, the launch included.
  double call_bytes(std::uint64_t kv_bytes) const;
  // K and V per second, launch apart: for the closed form.
  double kv_bytes_per_s() const { return bytes_per_s_ / bytes_read_per_kv_byte_; }

 private:
  double bytes_per_s_;
  double launch_s_;
  double bytes_read_per_kv_byte_;  // 1, or more where the products take longer than the reading
};

// The device of the rank that calls.
class ModelledDevice {
 public:
  explicit ModelledDevice(const AttentionModel& model) : model_(model) {}

  // Takes simulated time.
  void attend(std::uint64_t kv_bytes);
  static void wait(double seconds);

  void hold(std::uint64_t bytes) { held_ += bytes; }
  std::uint64_t held_bytes() const { return held_; }

 private:
  const AttentionModel& model_;
  std::uint64_t held_ = 0;
};

// Addresses for a message of so many bytes that is timed and never copied. The same for all ranks and all messages; to
// be called inside a rank.
std::span<std::byte> modelled_memory(std::size_t bytes, std::size_t largest);

}  // namespace treeattn::tools
