// SPDX-License-Identifier: Apache-2.0
// A number for this process.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <random>

namespace treeattn::base {

// Tells processes apart, those of different containers too.
inline std::uint64_t this_process() {
  static const std::uint64_t kRandom = (std::uint64_t{std::random_device{}()} << 32) | std::random_device{}();
  return kRandom ^ static_cast<std::uint64_t>(::getpid());
}

}  // namespace treeattn::base
