// SPDX-License-Identifier: Apache-2.0
// How a warp folds a piece of 16-bit K and V into the states of its rows, on tensor cores.
//
// Logits are q K^T with the rows of q as rows of the product. The weights of that product lie in registers exactly as
// the next one wants them: o^T += V^T w^T, so that 8 rows fill a tensor-core tile.
#pragma once

#include "kernels/cuda/decode/fold_rows.cuh"
#include "kernels/cuda/decode/half_queries.cuh"
#include "kernels/cuda/piece_copy.cuh"
#include "kernels/cuda/piece_scales.cuh"

namespace treeattn::kernels::cuda {

inline constexpr int kMmaTile = 16;  // keys of a piece

// One warp's part of a leaf. kHalves: 1 for up to 8 rows, 2 for up to 16. A thread has the logits of rows lane / 4 (and
// that plus 8), and of o^T the columns of rows lane % 4 * 2 and one more. T: bfloat16 or float16; for float32 see
// decode_mma32.cuh.
template <class T, int kColumns, int kHalves, class Query = SameQuery<T, kColumns / 16, kHalves>>
class MmaWarp {
 public:
  static constexpr int kDim = kColumns, kRows = 8 * kHalves, kHeads = 1, kTile = kMmaTile, kElementBytes = 2;
  static constexpr const char* kName = "mma";
  static constexpr bool kBoundByMemory = true;
  static constexpr bool kHandsOver = kRows == 16 && kDim == 128;  // as four states at a time have no room
  static constexpr bool kStartsAtOnce = true;                     // asks for keys before anything is read, if it can
  static constexpr bool kQueriesAsTheyAre = Query::kAsItIs;       // loading them waits for nothing
  static constexpr int kQueryBytes = 0;                           // of shared memory, where q is not in registers
  using Copy = PieceCopy<2 * kDim, kMmaTile>;
  using Scales = NoScales;
  static constexpr int kSteps = kDim / 16;

  __device__ MmaWarp(const AttentionParams& params, const WorkItem& work, int lane_number, std::uint32_t /*queries*/)
      : p(params), item(work), lane(lane_number), log2_scale(params.scale * merge::kLog2E) {
    // Four matrices: keys 0 to 7 and columns 0 to 7, then the next columns, then the next keys.
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      places[step] = Copy::offset(lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2);
    }
  }

  // Rows that the item does not have repeat its last: nobody reads what becomes of them.
  __device__ void load_queries(int /*number*/) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int row = min(lane / 4 + half * 8, item.rows() - 1);
      q.load(half, query_row(p, item.batch, query_of(item, row), head_of(p, item, row)), p.k.dim / 8, p.q_dtype, lane);
    }
    log2_scale *= q.unit;
  }

  __device__ void clear() { clear_rows(m, l, o); }

  // Folds a piece that has arrived at `address` into the state. whole: every row sees all its keys.
  __device__ void fold(const Piece& piece, std::uint32_t address, std::uint32_t /*scales*/, bool whole) {
    float s[2][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      std::uint32_t b[4];
      load_matrices(b, address + step / 4 * kPartBytes + places[step % 4]);
      q.multiply(s[0], step, b[0], b[1]);
      q.multiply(s[1], step, b[2], b[3]);
    }
    q.finish(s);
    if (whole && p.softcap == 0 && p.alibi_slopes == nullptr) {
#pragma unroll
      for (int i = 0; i < 4 * kHalves; ++i) s[i / 2 % 2][i / 4 * 2 + i % 2] *= log2_scale;
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) s[i / 4][i % 4] *= q.unit;
      special_logits<kHalves>(p, item, lane, s, piece, whole);
    }
    weigh_rows(s, kWeightShift<T>, m, l, o, lane);
    add_values(s, address + Copy::kBytes);
  }

  // The leaf is done: m, l and o as LeafStates wants them.
  __device__ void settle() { settle_rows(l, o, kWeightShift<T> == 0.0f ? 1.0f : 0x1p-14f); }
  __device__ int column(int n) const { return n * 16 + lane / 4; }
  static constexpr int kPairStep = 8;
  __device__ static constexpr bool owns(int /*row*/, int /*column*/) { return true; }
  float o[kHalves][kSteps][4];
  float m[kHalves], l[kHalves];  // l: this thread's keys only

 private:
  // o += weights * V. A weight is two numbers of T, so that rounding it costs 2^-16 and not 2^-9.
  __device__ void add_values(const float (&s)[2][4], std::uint32_t v_address) {
    std::uint32_t high[kHalves][2], low[kHalves][2];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        float a = s[t][2 * half], b = s[t][2 * half + 1];
        high[half][t] = take_limbs<T>(a, b);
        low[half][t] = pack<T>(a, b);
      }
    }
    // Several columns at once: the second product of a column must not wait for the first.
    constexpr int kBatch = kSteps % 4 == 0 ? 4 : 1;
#pragma unroll
    for (int n = 0; n < kSteps; n += kBatch) {
      std::uint32_t v[kBatch][4];
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        load_matrices_transposed(v[i], v_address + (n + i) / 4 * kPartBytes + places[(n + i) % 4]);
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) multiply_add<T>(o[half][n + i], v[i], high[half][0], high[half][1]);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) multiply_add<T>(o[half][n + i], v[i], low[half][0], low[half][1]);
      }
    }
  }

  const AttentionParams& p;
  const WorkItem& item;
  const int lane;
  float log2_scale;  // of a product of q
  static constexpr int kPartBytes = kMmaTile * 128;
  std::uint32_t places[4];  // where this lane's row of 8x8 matrices lies, for four steps of 16 columns
  Query q;
};

}  // namespace treeattn::kernels::cuda
