// SPDX-License-Identifier: Apache-2.0
// The first whole numbers, as a list.
#pragma once

#include <cstddef>
#include <numeric>
#include <vector>

namespace treeattn::base {

// 0, 1, ..., count - 1.
inline std::vector<int> counting(int count) {
  std::vector<int> numbers(static_cast<std::size_t>(count));
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

}  // namespace treeattn::base
