// SPDX-License-Identifier: Apache-2.0
// A warp to a row of weights, a lane to some of its columns: correct for every type and size.
#include "base/half.h"
#include "kernels/cuda/dependent_launch.cuh"
#include "kernels/cuda/device_rows.cuh"
#include "kernels/cuda/model/linear_kernels.h"
#include "kernels/cuda/ranks/warp_rows.cuh"

namespace treeattn::kernels::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kRowsAtOnce = 4;  // of x, for one read of the weights

__device__ float sum_of_warp(float value) {
  for (int distance = kLanes / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
  return value;
}

__device__ void store(float* y, float sum, bool add) { *y = add ? *y + sum : sum; }

// The row of weights of this warp; those beyond the last have none.
__device__ std::int64_t row_of_warp() { return blockIdx.x * std::int64_t{kWarps} + threadIdx.x / kLanes; }

__global__ void plain_kernel(WeightMatrix w, const float* x, std::int64_t rows, float* y, bool add) {
  let_next_start();
  wait_for_earlier();
  const std::int64_t n = row_of_warp();
  if (n >= w.rows) return;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const std::byte* weights = static_cast<const std::byte*>(w.data) + n * w.cols * element_size(w.dtype);
  const bool rounds = w.dtype == DType::kBFloat16 || w.dtype == DType::kInt8;
  for (std::int64_t first = 0; first < rows; first += kRowsAtOnce) {
    float sum[kRowsAtOnce] = {};
    for (int i = lane; i < w.cols; i += kLanes) {
      float weight = load_element(weights, i, w.dtype);
      if (w.dtype == DType::kInt8) weight *= w.scales[(n * w.cols + i) / w.group];
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        if (first + r >= rows) continue;
        const float value = x[(first + r) * w.cols + i];
        sum[r] = __fmaf_rn(weight, rounds ? base::bfloat16_to_float(base::float_to_bfloat16(value)) : value, sum[r]);
      }
    }
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      const float all = sum_of_warp(sum[r]);
      if (lane == 0 && first + r < rows) store(y + (first + r) * w.rows + n, all, add);
    }
  }
}

unsigned blocks_of(const WeightMatrix& w) { return static_cast<unsigned>((w.rows + kWarps - 1) / kWarps); }

}  // namespace

void plain_linear(const WeightMatrix& w, const float* x, std::int64_t rows, float* y, bool add, const Queue& queue) {
  if (rows == 0) return;
  start_dependent(plain_kernel, blocks_of(w), kWarps * kLanes, queue.overlaps, queue.stream, "linear map", w, x, rows,
                  y, add);
}

}  // namespace treeattn::kernels::cuda
