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
#include <type_traits>

#include "kernels/cuda/decode/half_queries.cuh"
#include "kernels/cuda/decode/leaf_handover.cuh"
#include "kernels/cuda/decode/leaf_merge.cuh"
#include "kernels/cuda/dependent_launch.cuh"
#include "kernels/cuda/generic_node.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/piece_copy.cuh"
#include "kernels/cuda/piece_scales.cuh"
#include "kernels/cuda/weights.cuh"

namespace treeattn::kernels::cuda {

inline constexpr int kMmaThreads = 32 * kMmaWarps;
inline constexpr int kMmaTile = 16;  // keys of a piece

// Read once: the compiler would rather read it again than keep it, and that takes long.
__device__ inline int lane_number() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// The shared memory of a block.
template <class Warp, int kStages>
struct MmaLayout {
  using Merge = std::conditional_t<Warp::kHandsOver, LeafHandover<Warp>, LeafMerge<Warp>>;
  static constexpr int kPieceBytes = 2 * Warp::Copy::kBytes;  // K, then V
  static constexpr int kPieces = kMmaWarps * kStages;
  static constexpr int kScales = kPieces * kPieceBytes;
  static constexpr int kNotes = kScales + kPieces * Warp::Scales::kBytes;  // a Piece each
  static constexpr int kBarriers = kNotes + kPieces * static_cast<int>(sizeof(Piece));
  static constexpr int kQueries = kBarriers + kPieces * 8;
  static constexpr int kStates = kQueries + Warp::kQueryBytes;
  static_assert(kStates % 16 == 0);

  // levels: log2 of the most leaves with keys that an item has.
  static std::size_t shared_bytes(int rows, int levels) {
    const std::size_t working = kStates + Merge::floats(rows, levels) * sizeof(float);
    const std::size_t afterwards = GenericScratch::floats(rows, Warp::kDim, Warp::kDim);
    return std::max(working, afterwards * sizeof(float));
  }
};

inline constexpr float kLog2E = 0x1.715476p+0f;

// Products q . k of a piece become logits where there is a mask, a soft-cap or slopes. A thread has those of rows
// lane / 4 (and that plus 8), keys lane % 4 * 2 and one more of every 8.
template <int kHalves, int kEights>
__device__ inline void special_logits(const AttentionParams& p, const WorkItem& item, int lane, float (&s)[kEights][4],
                                      const Piece& piece, bool whole) {
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
    for (int i = 0; i < 2 * kEights; ++i) {
      float& logit = s[i / 2][half * 2 + i % 2];
      const int token = piece.first + i / 2 * 8 + lane % 4 * 2 + i % 2;
      logit = p.softcap > 0 ? tanhf(logit * (p.scale / p.softcap)) * (p.softcap * kLog2E) : logit * (p.scale * kLog2E);
      if (p.alibi_slopes != nullptr) {
        const std::int64_t distance = p.first_key + token - (p.first_query[item.batch] + query);
        logit = __fmaf_rn(p.alibi_slopes[head_of(p, item, row)] * kLog2E, static_cast<float>(distance), logit);
      }
      if (token < begin || token >= end) logit = merge::kEmptyMax;
    }
  }
}

// Logits of one row of every thread become weights, times 2^shift; m and l move to the new maximum. Returns by what o
// has to be multiplied.
template <int kEights>
__device__ inline float weigh_row(float (&s)[kEights][4], int half, float shift, float& m, float& l) {
  float top = fmaxf(s[0][2 * half], s[0][2 * half + 1]);
#pragma unroll
  for (int t = 1; t < kEights; ++t) top = fmaxf(top, fmaxf(s[t][2 * half], s[t][2 * half + 1]));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  top = fmaxf(top, m);
  const float reference = top == merge::kEmptyMax ? 0.0f : top - shift;
  const float shrink = m == top || m == merge::kEmptyMax ? 1.0f : merge::state_weight(m, top);
  float sum = 0.0f;
#pragma unroll
  for (int t = 0; t < kEights; ++t) {
#pragma unroll
    for (int j = 2 * half; j < 2 * half + 2; ++j) {
      s[t][j] = exp2_fast(s[t][j] - reference);  // 0 for a hidden key
      sum += s[t][j];
    }
  }
  l = __fmaf_rn(l, shrink, sum);
  m = sum != sum ? sum : top;  // keys of which none is a number are not no keys
  return shrink;
}

// Rows of o^T lie in columns: multiplies each by the number that the threads of its logits have.
template <int kSteps>
__device__ inline void multiply_columns(float (&o)[kSteps][4], float of_row, int lane) {
  const float of_even = __shfl_sync(~0u, of_row, lane % 4 * 8);
  const float of_odd = __shfl_sync(~0u, of_row, lane % 4 * 8 + 4);
#pragma unroll
  for (int n = 0; n < kSteps; ++n) {
    o[n][0] *= of_even;
    o[n][1] *= of_odd;
    o[n][2] *= of_even;
    o[n][3] *= of_odd;
  }
}

// States of no keys.
template <int kHalves, int kSteps>
__device__ inline void clear_rows(float (&m)[kHalves], float (&l)[kHalves], float (&o)[kHalves][kSteps][4]) {
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    m[half] = merge::kEmptyMax;
    l[half] = 0.0f;
#pragma unroll
    for (int n = 0; n < kSteps; ++n) o[half][n][0] = o[half][n][1] = o[half][n][2] = o[half][n][3] = 0.0f;
  }
}

// Logits of a piece become weights, times 2^shift; m, l and o of the rows move to the new maximum.
template <int kHalves, int kEights, int kSteps>
__device__ inline void weigh_rows(float (&s)[kEights][4], float shift, float (&m)[kHalves], float (&l)[kHalves],
                                  float (&o)[kHalves][kSteps][4], int lane) {
  float shrink[kHalves];
  bool moved = false;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    shrink[half] = weigh_row(s, half, shift, m[half], l[half]);
    moved = moved || shrink[half] != 1.0f;
  }
  if (__any_sync(~0u, moved)) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) multiply_columns(o[half], shrink[half], lane);
  }
}

// Every thread has l of the keys of its row, not only of its own; l and o are taken out of units of 1 / unit.
template <int kHalves, int kSteps>
__device__ inline void settle_rows(float (&l)[kHalves], float (&o)[kHalves][kSteps][4], float unit) {
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    l[half] += __shfl_xor_sync(~0u, l[half], 1);
    l[half] += __shfl_xor_sync(~0u, l[half], 2);
    l[half] *= unit;
#pragma unroll
    for (int i = 0; i < 4 * kSteps; ++i) o[half][i / 4][i % 4] *= unit;
  }
}

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
      : p(params), item(work), lane(lane_number), log2_scale(params.scale * kLog2E) {
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

// Limbs of a weight times infinity, or a hidden NaN times zero, are not what they stand for: once more, plainly, and
// the rows of `to` that are not finite replaced.
__device__ __noinline__ inline void redo_item(const AttentionParams& p, float* to, float* memory) {
  const WorkItem item = p.items[blockIdx.x];
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

// Warp: how a warp folds a piece, an MmaWarp or an Mma8Warp.
template <class Warp, int kStages, int kBlocks>
__global__ void __launch_bounds__(kMmaThreads, kBlocks) decode_mma_kernel(const __grid_constant__ AttentionParams p) {
  using Layout = MmaLayout<Warp, kStages>;
  using Copy = typename Warp::Copy;
  constexpr int kTile = Warp::kTile;
  extern __shared__ __align__(1024) std::byte memory[];  // tensor copies exchange units by address
  // All on their way at once: a load that waits for another costs a microsecond. Of up to 32 sequences every lane asks
  // for one, before it is known which it will be.
  const bool in_grid = Warp::kStartsAtOnce && p.grid.count > 0;
  WorkItem item{};
  if (!in_grid) item = p.items[blockIdx.x];
  const int lane = lane_number();
  const bool few = p.batch <= 32;
  SequenceFacts sequence{};
  if (few && lane < p.batch) sequence = SequenceFacts::of(p, lane);
  const int number = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const std::uint32_t ring = shared_address(memory) + number * kStages * Layout::kPieceBytes;
  const StageBarriers barriers{shared_address(memory + Layout::kBarriers) + number * kStages * 8};
  auto* const notes = reinterpret_cast<Piece*>(memory + Layout::kNotes) + number * kStages;
  const bool scaled = Warp::Scales::any(p);
  const auto barrier_of = [&](int stage) { return barriers.address + 8 * stage; };
  // By one lane.
  const auto start_tensors = [&](int kv_head, int stage, const Piece& piece, const MapPlace& of_k,
                                 const MapPlace& of_v) {
    const int head = kv_head / Warp::kHeads;
    const std::uint32_t to = ring + stage * Layout::kPieceBytes, barrier = barrier_of(stage);
    Copy::expect(barrier, Layout::kPieceBytes);
    Copy::template start_tensor<Warp::kElementBytes>(to, barrier, p.k_map, of_k, head, scaled);
    Copy::template start_tensor<Warp::kElementBytes>(to + Copy::kBytes, barrier, p.v_map, of_v, head, scaled);
    notes[stage] = piece;
  };
  // Where the first keys are known before anything is read, they are asked for first, but one piece only: the others
  // come behind q, which would otherwise arrive microseconds later, behind the first keys of all blocks. Where there
  // are no others nothing is gained, and q comes before.
  const bool at_once = Warp::kStartsAtOnce && p.first_known, early = at_once && !p.q_first;
  const auto start_first = [&](int kv_head, int batch, int stage, int first) {
    first += stage * kMmaWarps * kTile;
    const MapPlace place(first, batch);
    start_tensors(kv_head, stage, {0, first, first, first + kTile}, place, place);
  };
  if (lane == 0) {
    barriers.init(kStages, !p.tensor_copies ? 32 : scaled ? 33 : 1);
    if (early) {
      const WorkItem own = p.grid.item(static_cast<int>(blockIdx.x));
      start_first(own.kv_head, own.batch, 0, first_token(p, own.first_leaf) + number * kTile);
    }
  }
  __syncwarp();
  if (in_grid) item = p.grid.item(static_cast<int>(blockIdx.x));
  if (p.tensor_copies && !at_once && threadIdx.x < 2) prefetch_map(threadIdx.x == 0 ? p.k_map : p.v_map);
  const int rows = item.rows();
  const typename Warp::Scales scales(
      p, item, shared_address(memory + Layout::kScales) + number * kStages * Warp::Scales::kBytes, kStages);
  Warp warp(p, item, lane, shared_address(memory + Layout::kQueries));
  const auto load_queries = [&] {
    warp.load_queries(number);
    if (Warp::kQueryBytes > 0) __syncthreads();
  };
  const auto start_scales = [&](int stage, const Piece& piece) {
    scales.start(stage, piece, lane);
    if (!p.tensor_copies || scaled) Copy::arrive_after_rows(barrier_of(stage));
    __syncwarp();
  };
  const bool has_q = Warp::kQueriesAsTheyAre && at_once;
  if (has_q) load_queries();  // nothing waits for registers here
  if (at_once) {
    const int first = first_token(p, item.first_leaf) + number * kTile;
#pragma unroll 1
    for (int stage = 0; stage < kStages; ++stage) {
      if (lane == 0 && (stage > 0 || !early)) start_first(item.kv_head, item.batch, stage, first);
      const int token = first + stage * kMmaWarps * kTile;
      start_scales(stage, {0, token, token, token + kTile});
    }
  }
  warp.clear();

  if (few) {
    sequence = {__shfl_sync(~0u, sequence.first_query, item.batch), __shfl_sync(~0u, sequence.length, item.batch)};
  } else {
    sequence = SequenceFacts::of(p, item.batch);
  }
  const ItemKeys keys(p, sequence, item);
  const RowSource k_rows(p.k, item, Warp::kElementBytes), v_rows(p.v, item, Warp::kElementBytes);
  LeafWalk at(keys);
  PieceWalk<kTile> ahead(at, number);
  // Tables and all keys but the newest are there long before; q and that key come from the kernel before this one.
  let_next_start();
  const int newest = static_cast<int>(sequence.length) - 1;
  // Starts the next piece, unless it is on its way already. Returns its leaf, or -1 where there is none.
  const auto start_next = [&](int stage, bool under_way) {
    const Piece piece = ahead.next(keys);
    if (piece.leaf < 0 || under_way) return piece.leaf;
    const bool has_newest = piece.first + kTile > newest;
    if (p.tensor_copies) {
      const MapPlace of_k(k_rows, piece.first), of_v(v_rows, piece.first);  // of pages: loads, which need not wait
      if (has_newest) wait_for_earlier();
      if (lane == 0) start_tensors(item.kv_head, stage, piece, of_k, of_v);
    } else {
      if (has_newest) wait_for_earlier();
      const std::uint32_t to = ring + stage * Layout::kPieceBytes;
      if (lane == 0) notes[stage] = piece;
      constexpr int kRowBytes = Warp::kHeads * Warp::kElementBytes;  // for each column
      Copy::start_rows(to, k_rows, p.k.dim * kRowBytes / 16, piece);
      Copy::start_rows(to + Copy::kBytes, v_rows, p.v.dim * kRowBytes / 16, piece);
    }
    start_scales(stage, piece);
    return piece.leaf;
  };
  typename Layout::Merge merger(reinterpret_cast<float*>(memory + Layout::kStates), rows, number, lane);
  // A turn takes a piece from a stage and starts the next into it; the first turns only start. The code is long, and
  // a short call spends its time waiting for instructions: so this is its only copy.
  int leaf_at[kStages];  // of the pieces on their way, the next first
  unsigned phase = 0;
  for (int stage = 0, turn = -kStages; !at.done(keys); ++turn) {
    if (turn == 0) {
      wait_for_earlier();
      if (!has_q) load_queries();
      merger.begin();
    }
    if (turn >= 0) {
      if (leaf_at[0] != at.leaf) {
        const int leaf = at.leaf;
        at.next(keys);
        merger.add_leaf(warp, leaf, at.done(keys) ? -1 : at.leaf);
        continue;
      }
      const std::uint32_t address = ring + stage * Layout::kPieceBytes;
      const Piece piece = notes[stage];
      const bool full = piece.first >= piece.begin && piece.first + kTile <= piece.end;
      barriers.wait(stage, phase);
      if (!full && p.tensor_copies) Copy::clear_others(address + Copy::kBytes, piece);
      warp.fold(piece, address, scales.address(stage),
                full && piece.first >= keys.all_begin && piece.first + kTile <= keys.all_end);
      if (!full) Copy::order_writes();
      __syncwarp();
    }
#pragma unroll
    for (int i = 0; i + 1 < kStages; ++i) leaf_at[i] = leaf_at[i + 1];
    leaf_at[kStages - 1] = start_next(stage, at_once && turn < 0);
    if (++stage == kStages) {
      stage = 0;
      if (turn >= 0) phase ^= 1;
    }
  }
  wait_for_earlier();  // where there were no keys
  const std::int64_t slot = item.group_slot + item.place;
  float* to = p.item_states + slot * state_stride(p);
  const bool finite = merger.store_root(warp, to, p.v.dim);
  if (__syncthreads_or(!finite)) {
    redo_item(p, to, reinterpret_cast<float*>(memory));
  } else if (item.group_items == 1) {
    return merger.store_result(p, item);
  }
  finish_item<Warp::kHeads == 2>(p, item);
}

// log2 of the most leaves with keys of an item: states that wait for others take shared memory. Items of the default
// 256 leaves are then no more than kMergeAtOnce. With 16 rows of 128 columns and q in shared memory they are twice as
// many, so that two blocks fit on a multiprocessor.
template <class Warp>
constexpr int levels_for(int rows) {
  if (Warp::kQueryBytes > 0 && Warp::kRows == 16 && Warp::kDim == 128) return 2;
  return rows <= 2 ? 4 : 3;
}

// Of items of at most `rows` rows, or as many as Warp takes.
template <class Warp, int kStages, int kBlocks = 2>
Launch decode_mma_launch(int rows) {
  using Layout = MmaLayout<Warp, kStages>;
  rows = std::min(rows, Warp::kRows);
  const int levels = levels_for<Warp>(rows);
  const std::size_t bytes = Layout::shared_bytes(rows, levels);
  Launch launch{decode_mma_kernel<Warp, kStages, kBlocks>, kMmaThreads, bytes, Warp::kName,
                {Warp::kRows, levels, Warp::kHeads},       Warp::kTile};
  launch.ring_bytes = Warp::kBoundByMemory ? Layout::kNotes : 0;
  launch.ring_tokens = kStages * kMmaWarps * Warp::kTile;
  launch.whole_lines = Warp::Copy::kPitch == 128;
  launch.waits = true;
  return launch;
}

// 64 KiB on their way to a block, or more.
template <class Warp>
inline constexpr int kStagesOf = std::max(2, (64 << 10) / (kMmaWarps * MmaLayout<Warp, 1>::kPieceBytes));

// The kernel for elements of T, head dim kDim and items of at most `rows` rows; the bits do not depend on kStages.
template <class T, int kDim>
Launch decode_mma_of_dim(int rows, std::size_t most_bytes) {
  using Warp = MmaWarp<T, kDim, 1>;
  constexpr int kStages = kStagesOf<Warp>;
  if constexpr (kDim <= 128) {
    // States of one or two rows leave room for a third block on a multiprocessor: while one begins or ends, two work.
    if (rows <= 2) return decode_mma_launch<Warp, kStages, 3>(rows);
    if (rows > 8) return decode_mma_launch<MmaWarp<T, kDim, 2>, kStages>(rows);
  } else {
    // The accumulators of 16 rows of 256 columns are more than there are registers.
    const Launch deeper = decode_mma_launch<Warp, 3>(rows);
    if (rows <= 4 && deeper.shared_bytes <= most_bytes) return deeper;
  }
  return decode_mma_launch<Warp, kStages>(rows);
}

// The same for q of another type. There is none for head dim 256: its limbs are more than there are registers.
template <class T>
Launch decode_mma_of_limbs(int dim, int rows) {
  return for_head_dim(dim, [&](auto fixed) {
    constexpr int kDim = fixed.value;
    if constexpr (kDim > 128) {
      return Launch{};
    } else {
      using Warp = MmaWarp<T, kDim, 1, LimbQuery<T, kDim / 16>>;
      return decode_mma_launch<Warp, kStagesOf<Warp>>(rows);
    }
  });
}

// The same for any head dim; kernel is null where there is none. Each type is compiled in a file of its own.
template <class T>
Launch decode_mma_launch(int dim, int rows, std::size_t most_bytes) {
  return for_head_dim(dim, [&](auto fixed) { return decode_mma_of_dim<T, fixed.value>(rows, most_bytes); });
}

}  // namespace treeattn::kernels::cuda
