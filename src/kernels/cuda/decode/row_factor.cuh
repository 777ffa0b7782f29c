// SPDX-License-Identifier: Apache-2.0
// Powers of two that bring a row into the range of a narrow type.
#pragma once

#include "kernels/limb_range.h"

namespace treeattn::kernels::cuda {

// 2^(exponent - 127), and what it has to be multiplied by for 1.
__device__ inline float power_of_two(int exponent) { return __int_as_float(exponent << 23); }
__device__ inline float inverse_power(float power) { return __int_as_float((254 << 23) - __float_as_int(power)); }
__device__ inline int exponent_of(float positive) { return __float_as_int(positive) >> 23; }

// What a row is multiplied by, and what products with it are in units of then.
struct RowScaling {
  float factor = 1.0f;
  float unit = 1.0f;
};
// The unit of a row whose limbs would lose bits: NaN, upon which its item is computed again without limbs.
__device__ inline float no_unit() { return __int_as_float(0x7fc00000); }

// Whether a limb that a float32 has to be cut into may be below 2^-126, where tensor cores may take it for zero.
__device__ inline bool loses_limbs(float x) { return x != 0.0f && fabsf(x) < kLeastWithLimbs; }

// By the power of two that brings the largest element of a row, `most` of this thread's columns, into
// [2^bits, 2^(bits + 1)). By 2^100 at most: a row that is too small for that has no unit. Four neighbouring lanes share
// a row.
__device__ inline RowScaling row_scaling(float most, int bits) {
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
  const float factor = power_of_two(min(127 + bits + 127 - exponent_of(most), 227));
  const bool too_small = most > 0.0f && most * factor < power_of_two(127 + bits);
  return {factor, too_small ? no_unit() : inverse_power(factor)};
}

}  // namespace treeattn::kernels::cuda
