// SPDX-License-Identifier: Apache-2.0
// What every block of a streamed map needs of x before it can end its first tile.
#pragma once

#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/model/norm.cuh"
#include "kernels/cuda/model/stream_task.cuh"

namespace treeattn::kernels::cuda {

inline constexpr int kMostHeldBytes = 9 << 10;  // of a row: two blocks fit on a multiprocessor of Hopper then

// The only row of x on its way to shared memory, and the sums of its squares, where a norm comes before the map, in the
// order of norm.cuh. All threads of a block bring it and meet before they use it. Everything is asked for at once.
class HeldRow {
 public:
  __device__ void load(const StreamTask& t) {
    const int parts = t.cols / kNormPart;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const int at = static_cast<int>(threadIdx.x) + i * kNormThreads;
      part[i] = t.x.squares != nullptr && at < parts ? t.x.squares[at] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const int at = static_cast<int>(threadIdx.x) + i * kNormThreads;
      if (at < parts) x[i] = reinterpret_cast<const uint4*>(t.x.rounded)[at];
    }
  }
  __device__ void store(const StreamTask& t, std::uint16_t* to, float (*squares)[kNormWarps], int warp,
                        int lane) const {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const int at = static_cast<int>(threadIdx.x) + i * kNormThreads;
      if (at < t.cols / kNormPart) reinterpret_cast<uint4*>(to)[at] = x[i];
    }
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kParts; ++i) sum += part[i];
    sum = sum_of_lanes(sum, 1);
    if (lane == 0) squares[0][warp] = sum;
  }

 private:
  static_assert(kNormPart == 8);  // elements of 16 bytes
  static constexpr int kParts = (kMostHeldBytes / 2 / kNormPart + kNormThreads - 1) / kNormThreads;
  float part[kParts];
  uint4 x[kParts];
};

// The same sums of every kNormWarps-th of several rows.
__device__ inline void add_squares_of_rows(const StreamTask& t, float (*squares)[kNormWarps], int warp, int lane) {
  if (t.x.squares == nullptr) return;
  const int parts = t.cols / kNormPart;
  for (int row = warp; row < t.rows; row += kNormWarps) {
    const float* from = t.x.squares + static_cast<std::int64_t>(row) * parts;
    float sum[kNormWarps] = {};
#pragma unroll 2
    for (int first = lane; first < parts; first += kNormThreads) {
#pragma unroll
      for (int w = 0; w < kNormWarps; ++w) sum[w] += first + w * kLanes < parts ? from[first + w * kLanes] : 0.0f;
    }
#pragma unroll
    for (int w = 0; w < kNormWarps; ++w) {
      sum[w] = sum_of_lanes(sum[w], 1);
      if (lane == 0) squares[row][w] = sum[w];
    }
  }
}

}  // namespace treeattn::kernels::cuda
