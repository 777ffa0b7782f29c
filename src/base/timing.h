// SPDX-License-Identifier: Apache-2.0
// How long something took, and what of many times is said.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <vector>

namespace treeattn::base {

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// 0 of none.
inline double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

}  // namespace treeattn::base
