// SPDX-License-Identifier: Apache-2.0
// Scaling of rows by powers of two, which changes no bits but the exponents. Static, for the reason in neon_loops.h.
#pragma once

#include <cstdint>

namespace treeattn::kernels::neon {

static inline float power_of_two(int exponent) {
  const std::uint32_t bits = static_cast<std::uint32_t>(exponent + 127) << 23;
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

// The largest magnitude; NaN does not count.
static inline float largest_of(const float* x, int count) {
  float largest = 0.0f;
  for (int i = 0; i < count; ++i) {
    const float magnitude = __builtin_fabsf(x[i]);
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

// The exponent k with largest * 2^k in [2^to, 2^(to + 1)), held within bounds.
static inline int scaling_exponent(float largest, int to, int least, int most) {
  std::uint32_t bits;
  __builtin_memcpy(&bits, &largest, 4);
  const int k = to - (static_cast<int>(bits >> 23 & 0xff) - 127);
  return k < least ? least : k > most ? most : k;
}

}  // namespace treeattn::kernels::neon
