// SPDX-License-Identifier: Apache-2.0
// A number that looks random, made of another one.
#pragma once

#include <cstdint>

namespace treeattn::base {

// The output function of SplitMix64 (Steele, Lea, Flood 2014): equal inputs, equal outputs, and every bit of the result
// depends on every bit of x, so that neighbouring numbers go far apart.
constexpr std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace treeattn::base
