// SPDX-License-Identifier: Apache-2.0
// Decode on tensor cores. A block works on one leaf of the tree at a time; its four warps share the leaf's keys, 16 at
// a time, and each keeps several such pieces of K and V on their way from memory. Up to 8 rows (query heads of a group,
// queries), or 16, share what is read. At the end of a leaf the warps' states are merged, and merged on up the tree as
// far as it is complete; the block's node goes where the last block of its group finds it.
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels/cuda/decode/leaf_handover.cuh"
#include "kernels/cuda/decode/leaf_merge.cuh"
#include "kernels/cuda/decode/mma_warp.cuh"
#include "kernels/cuda/dependent_launch.cuh"
#include "kernels/cuda/generic_node.cuh"
#include "kernels/cuda/launch.h"

namespace treeattn::kernels::cuda {

inline constexpr int kMmaThreads = 32 * kMmaWarps;

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
  float* to = states_of_item(p, item);
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
