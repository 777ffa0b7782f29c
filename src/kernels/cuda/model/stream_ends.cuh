// SPDX-License-Identifier: Apache-2.0
// The end of a tile of a streamed map: what its warps have is added up, divided by the sizes of rows, and stored.
#pragma once

#include "kernels/cuda/model/stream_copies.cuh"
#include "kernels/cuda/model/stream_rows.cuh"

namespace treeattn::kernels::cuda {

// Barriers of a block, by number (__syncthreads has 0), one for each of two buffers: `meet` waits for all of these
// threads, `arrive` for nobody. What one of them wrote before can be read by those who meet.
enum Barrier : int { kSumsThere = 1, kSumsTaken = 3 };
__device__ inline void meet(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ inline void arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// What every warp has added up of two tiles, by turns, for the warps that end them.
template <int kEnds>
using WarpSums = float4[2][kStreamWarps][kEnds][32];

// The warps that end tiles, kEnds of them, each with a tile of the tensor cores: they wait for the sums of the others,
// who go on meanwhile.
template <int kTiles, int kColumns, bool kHolds>
class TileEnds {
 public:
  static constexpr int kEnds = kTiles * kColumns, kAllThreads = kStreamThreads + 32 * kEnds;

  __device__ static void run(const StreamTask& t, const WarpSums<kEnds>& sums, float (*squares)[kNormWarps], int number,
                             int lane) {
    float inverse_size[2] = {};  // of the two rows of x that this thread has, if it has them
    bool first = true;
    int buffer = 0;
    for (int tile = static_cast<int>(blockIdx.x); tile < t.tiles; tile += static_cast<int>(gridDim.x), buffer ^= 1) {
      TileSums<8 * kTiles> result(t, tile, number / kColumns, number % kColumns, lane);
      result.load();
      if (first && kHolds) __syncthreads();  // with the others, who bring x and add up its squares
      if (first && !kHolds && t.x.squares != nullptr) add_squares_of_rows<kEnds>(t, squares, number, lane);
      meet(kSumsThere + buffer, kAllThreads);
      float all[4] = {};
#pragma unroll
      for (int w = 0; w < kStreamWarps; ++w) {
        const float4 part = sums[buffer][w][number][lane];
        all[0] += part.x;
        all[1] += part.y;
        all[2] += part.z;
        all[3] += part.w;
      }
      arrive(kSumsTaken + buffer, kAllThreads);
      if (t.x.squares != nullptr) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int row = number % kColumns * 8 + lane % 4 * 2 + j;
          if (first && row < t.rows) {
            const float* x = t.x.unrounded + static_cast<std::int64_t>(row) * t.cols;
            inverse_size[j] = inverse_of(squares[row], x, t.cols, t.x.eps);
          }
          all[j] *= inverse_size[j];
          all[2 + j] *= inverse_size[j];
        }
      }
      result.store(all);
      first = false;
    }
  }
};

}  // namespace treeattn::kernels::cuda
