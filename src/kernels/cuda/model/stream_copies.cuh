// SPDX-License-Identifier: Apache-2.0
// What a streamed map has on its way: each warp copies the next groups of its weights, and x where there are several
// rows, into shared memory of its own.
#pragma once

#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/model/stream_task.cuh"
#include "kernels/cuda/model/stream_weights.cuh"

namespace treeattn::kernels::cuda {

inline constexpr int kStreamWarps = 8;  // that share the columns of a tile
inline constexpr int kStreamThreads = 32 * kStreamWarps;
static_assert(kStreamThreads == kNormThreads);

// Of the groups of a warp: weights of kTiles tiles, and x where it is not in shared memory anyway.
template <int kTiles, class Weights>
struct GroupSlot {
  static constexpr int kWeightRow = kGroup * Weights::kBytes;
  static constexpr int kScales = 16 * kTiles * kWeightRow;  // bytes before them
  static constexpr int kWeights = kScales + 16 * kTiles * Weights::kScaleBytes;
  static constexpr int kRow = kGroup * 2;  // of a row of x
  // A unit of 16 bytes of a row of either half, and the row's scales.
  __device__ static int weight(int half, int row, int unit) {
    return (half * 8 * kTiles + row) * kWeightRow + Weights::exchanged(row, unit) * 16;
  }
  // The same of a row of x.
  __device__ static int x(int row, int unit) {
    return kWeights + row * kRow + BFloat16Weights::exchanged(row, unit) * 16;
  }
  __device__ static int scales(int half, int row) { return kScales + (half * 8 * kTiles + row) * Weights::kScaleBytes; }
  __host__ __device__ static int bytes(int rows, bool with_rows) { return kWeights + (with_rows ? rows * kRow : 0); }
};

// The copies of one warp, in the order in which it works on them.
template <int kTiles, class Weights>
class GroupCopies {
  using Place = GroupSlot<kTiles, Weights>;

 public:
  __device__ GroupCopies(const StreamTask& task, int warp, int lane_number, int turn_count)
      : t(task), number(warp), lane(lane_number), turns(turn_count), tile(static_cast<int>(blockIdx.x)) {
    find_rows();
  }

  __device__ int column_of(int of_turn) const { return first_column(of_turn) + lane % 4 * 8; }

  // The weights of the next group into a slot; nothing after the last. Two rows at a time, 256 bytes of each; or four
  // and 128. gently: two such copies, and the next two when they are there.
  __device__ void start_weights(std::uint32_t slot, bool gently = false) {
    if (tile < t.tiles && turns > 0) {
      const int column = first_column(turn) + lane % kUnits * (16 / Weights::kBytes);
      const bool there = column < t.cols;
      const std::int64_t next_rows = kRowsAtOnce * static_cast<std::int64_t>(t.cols) * Weights::kBytes;
      const std::byte* from[2] = {low + column * Weights::kBytes, high + column * Weights::kBytes};
#pragma unroll
      for (int i = 0; i < 2 * kCopies; ++i) {
        const int half = i / kCopies, row = i % kCopies * kRowsAtOnce + lane / kUnits;
        const bool valid = there && row < (half == 0 ? low_rows : high_rows);
        copy_async_16(slot + Place::weight(half, row, lane % kUnits), valid ? from[half] : t.weights[0].matrix, valid);
        from[half] += next_rows;
        if (gently && i % 2 == 1) wait_for_all_copies();
      }
      if constexpr (Weights::kScaleBytes > 0) start_scales(slot);
    }
  }
  // x of the group `of_turn`, behind its weights: two rows at a time as well.
  __device__ void start_rows(std::uint32_t slot, int of_turn) const {
    constexpr int kOfRow = Place::kRow / 16, kAtOnce = 32 / kOfRow;
    const int column = first_column(of_turn) + lane % kOfRow * 8;
    const bool there = column < t.cols;
    for (int row = lane / kOfRow; row < t.rows; row += kAtOnce) {
      const std::uint16_t* from = t.x.rounded + static_cast<std::int64_t>(row) * t.cols;
      copy_async_16(slot + Place::x(row, lane % kOfRow), from + (there ? column : 0), there);
    }
  }
  __device__ bool any() const { return tile < t.tiles && turns > 0; }
  __device__ int next_turn() const { return turn; }
  __device__ void advance() {
    if (++turn < turns) return;
    turn = 0;
    tile += static_cast<int>(gridDim.x);
    find_rows();
  }

 private:
  static constexpr int kUnits = Place::kWeightRow / 16;                                // of a row; a lane each
  static constexpr int kRowsAtOnce = 32 / kUnits, kCopies = 8 * kTiles / kRowsAtOnce;  // of either half

  __device__ int first_column(int of_turn) const { return (number + of_turn * kStreamWarps) * kGroup; }
  __device__ void find_rows() {
    if (tile >= t.tiles) return;
    const TileRows<8 * kTiles> rows(t, tile);
    const WeightRows &lows = t.weights[rows.map], &highs = t.weights[rows.high_source];
    low_rows = lows.rows - rows.low;
    high_rows = highs.rows - rows.high;
    low = lows.matrix + static_cast<std::int64_t>(rows.low + lane / kUnits) * t.cols * Weights::kBytes;
    high = highs.matrix + static_cast<std::int64_t>(rows.high + lane / kUnits) * t.cols * Weights::kBytes;
    if constexpr (Weights::kScaleBytes > 0) {
      const std::int64_t pitch = t.cols / kStep;
      low_scales = lows.scales + rows.low * pitch;
      high_scales = highs.scales + rows.high * pitch;
    }
  }
  // A lane to a scale: rows of scales need not begin at a multiple of 16 bytes.
  __device__ void start_scales(std::uint32_t slot) const {
    constexpr int kOfRow = kGroup / kStep, kRows = 32 / kOfRow;
    const int pitch = t.cols / kStep, at = (number + turn * kStreamWarps) * kOfRow + lane % kOfRow;
#pragma unroll
    for (int i = 0; i < 16 * kTiles / kRows; ++i) {
      const int half = i / (8 * kTiles / kRows), row = i % (8 * kTiles / kRows) * kRows + lane / kOfRow;
      const bool valid = at < pitch && row < (half == 0 ? low_rows : high_rows);
      const float* from = (half == 0 ? low_scales : high_scales) + static_cast<std::int64_t>(row) * pitch + at;
      copy_async_4(slot + Place::scales(half, row) + lane % kOfRow * 4, valid ? from : t.weights[0].scales, valid);
    }
  }

  const StreamTask& t;
  const int number, lane, turns;
  int tile, turn = 0;
  const std::byte *low = nullptr, *high = nullptr;  // of the row that this lane copies first
  int low_rows = 0, high_rows = 0;                  // that there are from the tile's first on
  const float *low_scales = nullptr, *high_scales = nullptr;
};

__device__ inline void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all but the last kLeft of them are there.
template <int kLeft>
__device__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

}  // namespace treeattn::kernels::cuda
