// SPDX-License-Identifier: Apache-2.0
// Whole numbers divided and rounded upwards.
#pragma once

#include <concepts>
#include <type_traits>

namespace treeattn::base {

// For value >= 0 and step > 0.
template <std::integral T>
constexpr T divide_up(T value, std::type_identity_t<T> step) {
  return (value + step - 1) / step;
}

// The next multiple of step.
template <std::integral T>
constexpr T round_up(T value, std::type_identity_t<T> step) {
  return divide_up(value, step) * step;
}

}  // namespace treeattn::base
