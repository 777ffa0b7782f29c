// SPDX-License-Identifier: Apache-2.0
// Decode on tensor cores. A block works on one leaf of the tree at a time; its four warps share the leaf's keys, 16 at
// a time, and each keeps several such pieces of K and V on their way from memory. Up to 8 rows (query heads of a group,
// queries), or 16, share what is read. At the end of a leaf the warps' states are merged, and merged on up the tree as
// far as it is complete; the block's node goes where the last block of its group finds it.
//
// Logits are q K^T with the rows of q as rows of the product. The weights of that product lie in registers exactly as
// the next one wants them: o^T += V^T w^T, so that 8 rows fill a tensor-core tile.
#pragma once

#include <algorithm>

#include "kernels/cuda/generic_node.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/leaf_merge.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/piece_copy.cuh"

namespace treeattn::kernels::cuda {

inline constexpr int kMmaThreads = 32 * kMmaWarps;
inline constexpr int kMmaTile = 16;  // keys of a piece

// Read once: the compiler would rather read it again than keep it, and that takes long.
__device__ inline int lane_number() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

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

// The shared memory of a block.
template <int kDim, int kHalves, int kStages>
struct MmaLayout {
  using Copy = PieceCopy<2 * kDim, kMmaTile>;
  static constexpr int kPieceBytes = 2 * Copy::kBytes;  // K, then V
  static constexpr int kPieces = kMmaWarps * kStages;
  static constexpr int kNotes = kPieces * kPieceBytes;  // a Piece each
  static constexpr int kBarriers = kNotes + kPieces * static_cast<int>(sizeof(Piece));
  static constexpr int kStates = kBarriers + kPieces * 8;
  static_assert(kStates % 16 == 0);

  // levels: log2 of the most leaves with keys that an item has.
  static std::size_t shared_bytes(int rows, int levels) {
    const std::size_t working = kStates + LeafMerge<kDim, 8 * kHalves>::floats(rows, levels) * sizeof(float);
    const std::size_t afterwards = std::max(GenericScratch::floats(rows, kDim, kDim), merge_floats(rows));
    return std::max(working, afterwards * sizeof(float));
  }
};

// One warp's part of a leaf. kHalves: 1 for up to 8 rows, 2 for up to 16. A thread has the logits of rows lane / 4 (and
// that plus 8), and of o^T the columns of rows lane % 4 * 2 and one more.
template <class T, int kDim, int kHalves>
class MmaWarp {
 public:
  using Copy = PieceCopy<2 * kDim, kMmaTile>;
  static constexpr int kSteps = kDim / 16;

  __device__ MmaWarp(const AttentionParams& params, const WorkItem& work, int lane_number)
      : p(params), item(work), lane(lane_number), log2_scale(params.scale * kLog2E) {
    // Four matrices: keys 0 to 7 and columns 0 to 7, then the next columns, then the next keys.
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      column[step] = Copy::offset(lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2);
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int row = lane / 4 + half * 8;
      const bool there = row < item.rows();
      const std::byte* from =
          query_row(p, item.batch, query_of(item, there ? row : 0), head_of(p, item, there ? row : 0));
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i) {
        const auto pair = reinterpret_cast<const std::uint32_t*>(from)[i * 4 + lane % 4];
        q[i / 2][i % 2 * kHalves + half] = there ? pair : 0;
      }
    }
  }

  __device__ void clear() {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      m[half] = merge::kEmptyMax;
      l[half] = 0.0f;
#pragma unroll
      for (int n = 0; n < kSteps; ++n) o[half][n][0] = o[half][n][1] = o[half][n][2] = o[half][n][3] = 0.0f;
    }
  }

  // Folds a piece that has arrived at `address` into the state. whole: every row sees all its keys.
  __device__ void fold(const Piece& piece, std::uint32_t address, bool whole) {
    float s[2][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      std::uint32_t b[4];
      load_matrices(b, address + step / 4 * kPartBytes + column[step % 4]);
      const std::uint32_t a[4] = {q[step][0], kHalves == 2 ? q[step][1] : 0, q[step][kHalves],
                                  kHalves == 2 ? q[step][3] : 0};
      multiply_add<T>(s[0], a, b[0], b[1]);
      multiply_add<T>(s[1], a, b[2], b[3]);
    }
    if (whole && p.softcap == 0 && p.alibi_slopes == nullptr) {
#pragma unroll
      for (int i = 0; i < 4 * kHalves; ++i) s[i / 2 % 2][i / 4 * 2 + i % 2] *= log2_scale;
    } else {
      special_logits(s, piece, whole);
    }
    weigh(s);
    add_values(s, address + Copy::kBytes);
  }

  // The leaf is done: stores this warp's state as one of a LeafMerge.
  __device__ void store(float* state, int rows) {
    constexpr float kUnit = kWeightShift<T> == 0.0f ? 1.0f : 0x1p-14f;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      float sum = l[half];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int row = lane / 4 + 8 * half;
      if (lane % 4 == 0 && row < rows) {
        float* to = state + row * LeafMerge<kDim, 8 * kHalves>::kPitch + kDim;
        to[0] = m[half];
        to[1] = sum * kUnit;
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int column_row = lane % 4 * 2 + j + 8 * half;
        if (column_row >= rows) continue;
        float* to = state + column_row * LeafMerge<kDim, 8 * kHalves>::kPitch + lane / 4;
#pragma unroll
        for (int n = 0; n < kSteps; ++n) {
          to[n * 16] = o[half][n][j] * kUnit;
          to[n * 16 + 8] = o[half][n][j + 2] * kUnit;
        }
      }
    }
  }

 private:
  static constexpr float kLog2E = 0x1.715476p+0f;

  // With a mask, a soft-cap or slopes.
  __device__ void special_logits(float (&s)[2][4], const Piece& piece, bool whole) const {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int row = min(lane / 4 + half * 8, item.rows() - 1);
      const int query = query_of(item, row);
      int begin = piece.begin, end = piece.end;
      if (!whole) {
        const Range seen = visible(p, item.batch, query);
        begin = max(begin, static_cast<int>(seen.begin));
        end = min(end, static_cast<int>(seen.end));
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& logit = s[i / 2][half * 2 + i % 2];
        const int token = piece.first + i / 2 * 8 + lane % 4 * 2 + i % 2;
        logit = p.softcap > 0 ? tanhf(logit * (p.scale / p.softcap)) * (p.softcap * kLog2E) : logit * log2_scale;
        if (p.alibi_slopes != nullptr) {
          const std::int64_t distance = p.first_key + token - (p.first_query[item.batch] + query);
          logit = __fmaf_rn(p.alibi_slopes[head_of(p, item, row)] * kLog2E, static_cast<float>(distance), logit);
        }
        if (token < begin || token >= end) logit = merge::kEmptyMax;
      }
    }
  }

  // Logits become weights; m, l and o move to the new maximum.
  __device__ void weigh(float (&s)[2][4]) {
    float shrink[kHalves];
    bool moved = false;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int i = 2 * half;
      float top = fmaxf(fmaxf(s[0][i], s[0][i + 1]), fmaxf(s[1][i], s[1][i + 1]));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      top = fmaxf(top, m[half]);
      const float reference = top == merge::kEmptyMax ? 0.0f : top - kWeightShift<T>;
      shrink[half] = m[half] == top || m[half] == merge::kEmptyMax ? 1.0f : merge::state_weight(m[half], top);
      moved = moved || shrink[half] != 1.0f;
      float sum = 0.0f;
#pragma unroll
      for (int t = 0; t < 2; ++t) {
#pragma unroll
        for (int j = i; j < i + 2; ++j) {
          s[t][j] = exp2_fast(s[t][j] - reference);  // 0 for a hidden key
          sum += s[t][j];
        }
      }
      l[half] = __fmaf_rn(l[half], shrink[half], sum);
      m[half] = sum != sum ? sum : top;  // keys of which none is a number are not no keys
    }
    if (__any_sync(~0u, moved)) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const float of_even = __shfl_sync(~0u, shrink[half], lane % 4 * 8);
        const float of_odd = __shfl_sync(~0u, shrink[half], lane % 4 * 8 + 4);
#pragma unroll
        for (int n = 0; n < kSteps; ++n) {
          o[half][n][0] *= of_even;
          o[half][n][1] *= of_odd;
          o[half][n][2] *= of_even;
          o[half][n][3] *= of_odd;
        }
      }
    }
  }

  // o += weights * V. A weight is two numbers of T, so that rounding it costs 2^-16 and not 2^-9.
  __device__ void add_values(const float (&s)[2][4], std::uint32_t v_address) {
    std::uint32_t high[kHalves][2], low[kHalves][2];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const float a = s[t][2 * half], b = s[t][2 * half + 1];
        high[half][t] = pack<T>(a, b);
        const float2 rounded = unpack<T>(high[half][t]);
        low[half][t] = pack<T>(a - rounded.x, b - rounded.y);
      }
    }
    // Several columns at once: the second product of a column must not wait for the first.
    constexpr int kBatch = kSteps % 4 == 0 ? 4 : 1;
#pragma unroll
    for (int n = 0; n < kSteps; n += kBatch) {
      std::uint32_t v[kBatch][4];
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        load_matrices_transposed(v[i], v_address + (n + i) / 4 * kPartBytes + column[(n + i) % 4]);
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
  const float log2_scale;
  static constexpr int kPartBytes = kMmaTile * 128;
  std::uint32_t column[4];  // where this lane's row of 8x8 matrices lies, for four steps of 16 columns
  std::uint32_t q[kSteps][2 * kHalves];
  float o[kHalves][kSteps][4];
  float m[kHalves], l[kHalves];  // l: this thread's keys only
};

// Limbs of a weight times infinity, or a hidden NaN times zero, are not what they stand for: once more, plainly, and
// the rows of `to` that are not finite replaced.
__device__ __noinline__ inline void redo_item(const AttentionParams& p, const WorkItem& item, float* to,
                                              float* memory) {
  const int rows = item.rows(), row_floats = row_state_floats(p.v.dim);
  const GenericScratch scratch(memory, rows, p.k.dim);
  __syncthreads();
  generic_node(p, item, scratch);
  __syncthreads();
  for (int r = 0; r < rows; ++r) {
    bool good = true;
    for (int i = threadIdx.x; i < p.v.dim + 2; i += blockDim.x) {
      good = good && (i == p.v.dim || isfinite(to[r * row_floats + i]));
    }
    if (__syncthreads_and(good)) continue;
    for (int i = threadIdx.x; i < row_floats; i += blockDim.x)
      to[r * row_floats + i] = scratch.stack[r * row_floats + i];
  }
  __syncthreads();
}

template <class T, int kDim, int kHalves, int kStages>
__global__ void __launch_bounds__(kMmaThreads, 2) decode_mma_kernel(const __grid_constant__ AttentionParams p) {
  using Layout = MmaLayout<kDim, kHalves, kStages>;
  using Copy = typename Layout::Copy;
  extern __shared__ __align__(1024) std::byte memory[];  // tensor copies exchange units by address
  const WorkItem item = p.items[blockIdx.x];
  const int rows = item.rows();
  const int lane = lane_number(), number = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const std::uint32_t ring = shared_address(memory) + number * kStages * Layout::kPieceBytes;
  const StageBarriers barriers{shared_address(memory + Layout::kBarriers) + number * kStages * 8};
  auto* const notes = reinterpret_cast<Piece*>(memory + Layout::kNotes) + number * kStages;
  barriers.init(kStages, p.tensor_copies);

  const ItemKeys keys(p, item);
  const RowSource k_rows(p.k, item, 2), v_rows(p.v, item, 2);
  LeafWalk at(keys);
  PieceWalk<kMmaTile> ahead(at, number);
  // Starts the next piece. Returns its leaf, or -1 where there is none.
  const auto start_next = [&](int stage) {
    const Piece piece = ahead.next(keys);
    if (piece.leaf < 0) return -1;
    const std::uint32_t to = ring + stage * Layout::kPieceBytes, barrier = barriers.address + 8 * stage;
    if (p.tensor_copies) {
      if (lane == 0) {
        notes[stage] = piece;
        Copy::expect(barrier, Layout::kPieceBytes);
        Copy::start_tensor(to, barrier, p.k_map, k_rows, item.kv_head, piece.first);
        Copy::start_tensor(to + Copy::kBytes, barrier, p.v_map, v_rows, item.kv_head, piece.first);
      }
    } else {
      if (lane == 0) notes[stage] = piece;
      Copy::start_rows(to, k_rows, piece);
      Copy::start_rows(to + Copy::kBytes, v_rows, piece);
      Copy::arrive_after_rows(barrier);
    }
    __syncwarp();
    return piece.leaf;
  };
  MmaWarp<T, kDim, kHalves> warp(p, item, lane);
  LeafMerge<kDim, 8 * kHalves> merger(reinterpret_cast<float*>(memory + Layout::kStates), rows);
  warp.clear();
  // A turn takes a piece from a stage and starts the next into it; the first turns only start. The code is long, and
  // a short call spends its time waiting for instructions: so this is its only copy.
  int leaf_at[kStages];  // of the pieces on their way, the next first
  unsigned phase = 0;
  for (int stage = 0, turn = -kStages; !at.done(keys); ++turn) {
    if (turn >= 0) {
      if (leaf_at[0] != at.leaf) {
        warp.store(merger.state_of(number), rows);
        const int leaf = at.leaf;
        at.next(keys);
        merger.add_leaf(leaf, at.done(keys) ? -1 : at.leaf);
        warp.clear();
        continue;
      }
      const std::uint32_t address = ring + stage * Layout::kPieceBytes;
      const Piece piece = notes[stage];
      const bool full = piece.first >= piece.begin && piece.first + kMmaTile <= piece.end;
      barriers.wait(stage, phase);
      if (!full && p.tensor_copies) Copy::clear_others(address + Copy::kBytes, piece);
      warp.fold(piece, address, full && piece.first >= keys.all_begin && piece.first + kMmaTile <= keys.all_end);
      if (!full) Copy::order_writes();
      __syncwarp();
    }
#pragma unroll
    for (int i = 0; i + 1 < kStages; ++i) leaf_at[i] = leaf_at[i + 1];
    leaf_at[kStages - 1] = start_next(stage);
    if (++stage == kStages) {
      stage = 0;
      if (turn >= 0) phase ^= 1;
    }
  }
  const std::int64_t slot = p.groups[item.group].first_item + item.place;
  float* to = p.item_states + slot * (static_cast<std::int64_t>(p.rows_per_item) * row_state_floats(kDim));
  const bool finite = merger.store_root(to);
  if (__syncthreads_or(!finite)) redo_item(p, item, to, reinterpret_cast<float*>(memory));
  finish_item(p, item, reinterpret_cast<float*>(memory));
}

template <class T, int kDim, int kHalves, int kStages>
Launch decode_mma_launch(int rows) {
  // States that wait for others take shared memory: the more rows, the fewer.
  const int levels = rows <= 2 ? 4 : rows <= 8 ? 3 : 2;
  const std::size_t bytes = MmaLayout<kDim, kHalves, kStages>::shared_bytes(rows, levels);
  return {decode_mma_kernel<T, kDim, kHalves, kStages>, kMmaThreads, bytes, "mma", {8 * kHalves, levels}, kMmaTile};
}

// The kernel for elements of T, head dim kDim and items of at most `rows` rows.
template <class T, int kDim>
Launch decode_mma_launch(int rows) {
  // Three pieces of every warp on their way where two blocks of that fit into a multiprocessor, else two.
  if (rows <= 4) return decode_mma_launch<T, kDim, 1, 3>(rows);
  // The accumulators of 16 rows of 256 columns are more than there are registers.
  if constexpr (kDim <= 128) {
    if (rows > 8) return decode_mma_launch<T, kDim, 2, 2>(std::min(rows, 16));
  }
  return decode_mma_launch<T, kDim, 1, 2>(std::min(rows, 8));
}

// The same for any head dim; kernel is null where there is none. Each type is compiled in a file of its own.
template <class T>
Launch decode_mma_launch(int dim, int rows) {
  switch (dim) {
    case 64:
      return decode_mma_launch<T, 64>(rows);
    case 80:
      return decode_mma_launch<T, 80>(rows);
    case 96:
      return decode_mma_launch<T, 96>(rows);
    case 128:
      return decode_mma_launch<T, 128>(rows);
    case 256:
      return decode_mma_launch<T, 256>(rows);
    default:
      return {};
  }
}

}  // namespace treeattn::kernels::cuda
