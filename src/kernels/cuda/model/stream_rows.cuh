// SPDX-License-Identifier: Apache-2.0
// Rows of x that come in float32, normalised and rounded into the shared memory of every block that needs them.
#pragma once

#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/model/norm.cuh"
#include "kernels/cuda/model/stream_task.cuh"

namespace treeattn::kernels::cuda {

inline constexpr int kMostVectors = 4;  // of four columns, that a thread has of a row
inline constexpr int kMostCols = kMostVectors * 4 * kNormThreads;
inline constexpr int kMostFloatBytes = 36 << 10;  // of shared memory, once they are rounded

// Rows in shared memory lie so far apart, in elements, that two of them begin in different banks.
__host__ __device__ inline int row_pitch(int cols) { return cols + 32; }

// A norm's weights of this thread; they are read before x is there.
struct NormPart {
  float4 weight[kMostVectors];

  __device__ explicit NormPart(const StreamTask& t) {
#pragma unroll
    for (int j = 0; j < kMostVectors; ++j) {
      const int i = 4 * (static_cast<int>(threadIdx.x) + j * kNormThreads);
      weight[j] = t.x.norm != nullptr && i < t.cols ? *reinterpret_cast<const float4*>(t.x.norm + i) : float4{};
    }
  }
};

// The sums and products of norm.cuh and norm_kernel. Called by all threads of the block, kNormThreads.
__device__ inline void round_rows(const StreamTask& t, const NormPart& norm, std::uint16_t* to, float* scratch) {
  for (int row = 0; row < t.rows; ++row, to += row_pitch(t.cols)) {
    const float* from = t.x.floats + static_cast<std::int64_t>(row) * t.cols;
    float4 x[kMostVectors];
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < kMostVectors; ++j) {
      const int i = 4 * (static_cast<int>(threadIdx.x) + j * kNormThreads);
      x[j] = i < t.cols ? *reinterpret_cast<const float4*>(from + i) : float4{};
    }
    if (t.x.norm != nullptr) {
#pragma unroll
      for (int j = 0; j < kMostVectors; ++j) squares = add_squares(x[j], squares);
      const float by = inverse_size(squares, t.cols, t.x.eps, scratch);
#pragma unroll
      for (int j = 0; j < kMostVectors; ++j) {
        const float4 weight = norm.weight[j];
        x[j] = {x[j].x * by * weight.x, x[j].y * by * weight.y, x[j].z * by * weight.z, x[j].w * by * weight.w};
      }
    }
#pragma unroll
    for (int j = 0; j < kMostVectors; ++j) {
      const int i = 4 * (static_cast<int>(threadIdx.x) + j * kNormThreads);
      if (i >= t.cols) continue;
      *reinterpret_cast<uint2*>(to + i) = {pack<__nv_bfloat16>(x[j].x, x[j].y), pack<__nv_bfloat16>(x[j].z, x[j].w)};
    }
  }
  __syncthreads();
}

}  // namespace treeattn::kernels::cuda
