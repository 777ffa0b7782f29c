// SPDX-License-Identifier: Apache-2.0
// Powers of two that bring a row into the range of a narrow type.
#pragma once

namespace treeattn::kernels::cuda {

// 2^(exponent - 127), and what it has to be multiplied by for 1.
__device__ inline float power_of_two(int exponent) { return __int_as_float(exponent << 23); }
__device__ inline float inverse_power(float power) { return __int_as_float((254 << 23) - __float_as_int(power)); }
__device__ inline int exponent_of(float positive) { return __float_as_int(positive) >> 23; }

// The power of two that brings the largest element of a row, `most` of this thread's columns, into
// [2^bits, 2^(bits + 1)), if there is one whose inverse is a float too. Four neighbouring lanes share a row.
__device__ inline float row_factor(float most, int bits) {
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
  return power_of_two(min(127 + bits + 127 - exponent_of(most), 227));
}

}  // namespace treeattn::kernels::cuda
