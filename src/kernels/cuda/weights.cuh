// SPDX-License-Identifier: Apache-2.0
// Weights of keys, as the tensor-core kernels make them.
#pragma once

#include <cuda_fp16.h>

namespace treeattn::kernels::cuda {

// 2^x by the processor's own instruction: relative error below 2^-22, 0 for -inf.
__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Weights are multiplied by 2^this while they are numbers of T: a float16 below 2^-14 has fewer bits.
template <class T>
inline constexpr float kWeightShift = 0.0f;
template <>
inline constexpr float kWeightShift<__half> = 14.0f;

}  // namespace treeattn::kernels::cuda
