// SPDX-License-Identifier: Apache-2.0
// A device that is only modelled: work takes time, memory is counted, and nothing is computed or allocated.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "attention_model.h"

namespace treeattn::tools {

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
