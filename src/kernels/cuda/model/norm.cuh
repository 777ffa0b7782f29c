// SPDX-License-Identifier: Apache-2.0
// The sums that norms divide by, each in one order wherever it is computed.
#pragma once

#include <cstdint>

#include "kernels/cuda/model/model_kernels.h"
#include "kernels/cuda/ranks/warp_rows.cuh"

namespace treeattn::kernels::cuda {

inline constexpr int kNormThreads = 256;

__device__ inline float add_squares(const float4& x, float sum) {
  return __fmaf_rn(x.w, x.w, __fmaf_rn(x.z, x.z, __fmaf_rn(x.y, x.y, __fmaf_rn(x.x, x.x, sum))));
}

// Whether mean(x^2) + eps is one to go on with: no square has overflowed, and not so many have lost bits that it
// counts.
__device__ inline bool is_sound(float mean) { return mean >= 0x1p-126f && mean <= 0x1.fffffep+127f; }

// 1 / sqrt(mean(x^2) + eps) where it is not: in double, which has room for the squares of all float32. Each thread goes
// through the row alone, as hardly ever one has to.
__noinline__ __device__ inline double inverse_in_double(const float* x, std::int64_t dim, float eps) {
  double sum = 0.0;
  for (std::int64_t i = 0; i < dim; ++i) sum += static_cast<double>(x[i]) * x[i];
  return 1.0 / sqrt(sum / static_cast<double>(dim) + eps);
}

// mean(x^2) + eps of a row whose squares the kNormThreads threads of a block have added up, each its own, in all of
// them. shared: kNormThreads / kLanes floats.
__device__ inline float mean_square(float squares, std::int64_t dim, float eps, float* shared) {
  for (int distance = kLanes / 2; distance > 0; distance /= 2) squares += __shfl_xor_sync(~0u, squares, distance);
  __syncthreads();  // whoever used `shared` before is done
  if (threadIdx.x % kLanes == 0) shared[threadIdx.x / kLanes] = squares;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kNormThreads / kLanes; ++warp) sum += shared[warp];
  return sum / static_cast<float>(dim) + eps;
}

// The squares of a row that are this thread's: four neighbours at a time where that goes even.
__device__ inline float squares_of_thread(const float* x, std::int64_t dim) {
  float sum = 0.0f;
  if (dim % 4 == 0) {
    for (std::int64_t i = 4 * threadIdx.x; i < dim; i += 4 * kNormThreads) {
      sum = add_squares(*reinterpret_cast<const float4*>(x + i), sum);
    }
  } else {
    for (std::int64_t i = threadIdx.x; i < dim; i += kNormThreads) sum = __fmaf_rn(x[i], x[i], sum);
  }
  return sum;
}

// The sum of values that lanes `distance`, 2 * distance, ... apart have, in all of them.
__device__ inline float sum_of_lanes(float value, int distance) {
  for (; distance < kLanes; distance *= 2) value += __shfl_xor_sync(~0u, value, distance);
  return value;
}

// Sums of squares of the parts of a row: warp w of kNormWarps has those of the parts 32 w + lane, and so on after as
// many parts as there are threads; then the warps' sums are added in order.
inline constexpr int kNormWarps = kNormThreads / kLanes;

// 1 / sqrt(mean(x^2) + eps) of the row x whose squares they are.
__device__ inline float inverse_of(const float (&squares)[kNormWarps], const float* x, int dim, float eps) {
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kNormWarps; ++warp) sum += squares[warp];
  const float mean = sum / static_cast<float>(dim) + eps;
  return is_sound(mean) ? 1.0f / sqrtf(mean) : static_cast<float>(inverse_in_double(x, dim, eps));
}

}  // namespace treeattn::kernels::cuda
