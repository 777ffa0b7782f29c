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

// The same sums of every kOf-th of several rows, two at a time: a warp has nothing else on its way meanwhile.
template <int kOf>
__device__ inline void add_squares_of_rows(const StreamTask& t, float (*squares)[kNormWarps], int warp, int lane) {
  constexpr int kRows = 2;
  const int parts = t.cols / kNormPart;
  for (int first_row = warp; first_row < t.rows; first_row += kRows * kOf) {
    float sum[kRows][kNormWarps] = {};
#pragma unroll 2
    for (int first = lane; first < parts; first += kNormThreads) {
#pragma unroll
      for (int i = 0; i < kRows * kNormWarps; ++i) {
        const int row = first_row + i / kNormWarps * kOf, part = first + i % kNormWarps * kLanes;
        const bool there = row < t.rows && part < parts;
        sum[i / kNormWarps][i % kNormWarps] +=
            there ? t.x.squares[static_cast<std::int64_t>(row) * parts + part] : 0.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < kRows * kNormWarps; ++i) {
      const int row = first_row + i / kNormWarps * kOf;
      const float all = sum_of_lanes(sum[i / kNormWarps][i % kNormWarps], 1);
      if (lane == 0 && row < t.rows) squares[row][i % kNormWarps] = all;
    }
  }
}

}  // namespace treeattn::kernels::cuda
