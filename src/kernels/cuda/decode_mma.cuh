// SPDX-License-Identifier: Apache-2.0
// Decode on tensor cores. Every warp is a stream of its own: it takes leaves of the tree, one after the other, 16 keys
// at a time, keeps several such pieces of K and V on their way from memory, and waits for no other warp. Up to 16 rows
// (query heads of a group, queries) share what is read. A leaf's state stays in registers; earlier ones of the same
// warp wait in shared memory until their sibling is done. At the end the warps' nodes are merged, and the block's node
// goes where the last block finds it.
#pragma once

#include <algorithm>

#include "kernels/cuda/generic_node.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/tile_cursor.cuh"

namespace treeattn::kernels::cuda {

inline constexpr int kMmaRows = 16;
inline constexpr int kMmaWarps = 4;
inline constexpr int kMmaThreads = 32 * kMmaWarps;
inline constexpr int kMmaLeaves = 4;  // most leaves of a warp

template <int kDim, int kStageCount>
struct MmaLayout {
  static constexpr int kStages = kStageCount;
  static constexpr int kRowBytes = 2 * kDim + 16;               // an odd number of 16-byte units: no bank conflicts
  static constexpr int kPieceBytes = 2 * kMmaTile * kRowBytes;  // K, then V
  static constexpr int kRingBytes = kMmaWarps * kStages * kPieceBytes;

  // States that a warp with so many leaves keeps aside.
  __host__ __device__ static int slots(int leaves) { return leaves <= 2 ? 1 : 2; }
  static std::size_t shared_bytes(int rows, int leaves_of_item) {
    const int leaves = std::max(1, leaves_of_item / kMmaWarps);
    const std::size_t kept = static_cast<std::size_t>(kMmaWarps * slots(leaves)) * rows * (kDim + 2) * sizeof(float);
    const std::size_t afterwards = std::max(GenericScratch::floats(rows, kDim, kDim), merge_floats(rows, kDim + 2));
    return std::max(kRingBytes + kept, afterwards * sizeof(float));
  }
};

// 2^x by the processor's own instruction: relative error below 2^-22, 0 for -inf.
__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <class T, int kDim, int kStages>
class MmaWarp {
 public:
  using Layout = MmaLayout<kDim, kStages>;
  static constexpr int kChunks = kDim / 8;   // 16-byte units of a row
  static constexpr int kSteps = kDim / 16;   // of the dot product
  static constexpr int kColumns = kDim / 8;  // tiles of 8 columns of o

  __device__ MmaWarp(const AttentionParams& params, const WorkItem& work, std::byte* ring)
      : p(params),
        item(work),
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32),
        k_rows(params.k, work),
        v_rows(params.v, work),
        ring_address(shared_address(ring + warp * Layout::kStages * Layout::kPieceBytes)) {
    load_queries();
  }

  // Starts the copy of the keys of a tile.
  __device__ void prefetch(const TileCursor& tile, int stage) const {
    if (tile.first >= tile.begin && tile.first + kMmaTile <= tile.end) {
      copy_rows(
          stage, [&](int row) { return tile.first + row; }, [](int) { return true; });
    } else {
      const auto valid = [&](int row) { return tile.first + row >= tile.begin && tile.first + row < tile.end; };
      copy_rows(
          stage, [&](int row) { return valid(row) ? tile.first + row : tile.begin; }, valid);
    }
  }

  __device__ void clear() {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.0f;
    m[0] = m[1] = merge::kEmptyMax;
    l[0] = l[1] = 0.0f;
  }

  // Folds the keys of a tile, which have arrived, into this warp's state. `whole`: every row sees all of them.
  __device__ void fold(const TileCursor& tile, int stage, bool whole) {
    const std::uint32_t k_address = ring_address + stage * Layout::kPieceBytes;
    float s[2][4] = {};
    const int matrix = lane / 8;
    const std::uint32_t k_row = k_address + ((matrix / 2) * 8 + lane % 8) * Layout::kRowBytes + (matrix % 2) * 16;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      std::uint32_t b[4];
      load_matrices(b, k_row + step * 32);
      multiply_add<T>(s[0], q[step], b[0], b[1]);
      multiply_add<T>(s[1], q[step], b[2], b[3]);
    }
    to_logits(s, tile, whole);
    weigh(s);
    add_values(s, k_address + kMmaTile * Layout::kRowBytes);
  }

  // The leaf is done: l, so far of each thread's keys, becomes the sum of all.
  __device__ void finish_leaf() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      l[half] += __shfl_xor_sync(~0u, l[half], 1);
      l[half] += __shfl_xor_sync(~0u, l[half], 2);
    }
  }

  // This warp's state = merge(kept, this warp's state). kept [rows, kDim + 2], shared memory.
  __device__ void merge_with(const float* kept, int rows) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + 8 * half;
      if (row >= rows) continue;
      const float* from = kept + row * (kDim + 2);
      float top;
      const MergeWeights weights = MergeWeights::of(from[0], m[half], top);
      m[half] = top;
      l[half] = weights.merged(from[1], l[half]);
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        const float2 low = *reinterpret_cast<const float2*>(from + 2 + n * 8 + lane % 4 * 2);
        o[n][2 * half] = weights.merged(low.x, o[n][2 * half]);
        o[n][2 * half + 1] = weights.merged(low.y, o[n][2 * half + 1]);
      }
    }
  }

  __device__ void keep(float* kept, int rows) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + 8 * half;
      if (row >= rows) continue;
      float* to = kept + row * (kDim + 2);
      if (lane % 4 == 0) {
        to[0] = m[half];
        to[1] = l[half];
      }
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        *reinterpret_cast<float2*>(to + 2 + n * 8 + lane % 4 * 2) = make_float2(o[n][2 * half], o[n][2 * half + 1]);
      }
    }
  }

 private:
  template <class Token, class Valid>
  __device__ void copy_rows(int stage, const Token& token, const Valid& valid) const {
    const std::uint32_t to = ring_address + stage * Layout::kPieceBytes;
#pragma unroll
    for (int i = 0; i < (kMmaTile * kChunks + 31) / 32; ++i) {
      const int unit = i * 32 + lane;
      if (kMmaTile * kChunks % 32 != 0 && unit >= kMmaTile * kChunks) break;
      const int row = unit / kChunks, column = unit % kChunks;
      const std::uint32_t offset = row * Layout::kRowBytes + column * 16;
      copy_async_16(to + offset, k_rows.row(token(row)) + column * 16, valid(row));
      copy_async_16(to + kMmaTile * Layout::kRowBytes + offset, v_rows.row(token(row)) + column * 16, valid(row));
    }
  }

  __device__ void load_queries() {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + (i % 2) * 8;
        const int column = step * 16 + lane % 4 * 2 + (i / 2) * 8;
        q[step][i] = 0;
        if (row < item.rows()) {
          const std::byte* from = query_row(p, item.batch, query_of(item, row), head_of(p, item, row));
          q[step][i] = *reinterpret_cast<const std::uint32_t*>(from + 2 * column);
        }
      }
    }
  }

  // The key that s[tile][i] belongs to, within this warp's 16.
  __device__ int key_of(int t, int i) const { return t * 8 + lane % 4 * 2 + i % 2; }

  __device__ void to_logits(float (&s)[2][4], const TileCursor& tile, bool whole) const {
    constexpr float kLog2E = 0x1.715476p+0f;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float logit = p.softcap > 0 ? tanhf(s[t][i] * (p.scale / p.softcap)) * (p.softcap * kLog2E)
                                    : s[t][i] * (p.scale * kLog2E);
        if (p.alibi_slopes != nullptr || !whole) {
          const int row = min(lane / 4 + i / 2 * 8, item.rows() - 1);
          const int token = tile.first + key_of(t, i);
          const int query = query_of(item, row);
          if (p.alibi_slopes != nullptr) {
            const std::int64_t distance = p.first_key + token - (p.first_query[item.batch] + query);
            logit = __fmaf_rn(p.alibi_slopes[head_of(p, item, row)] * kLog2E, static_cast<float>(distance), logit);
          }
          const Range range = visible(p, item.batch, query);
          if (token < max(static_cast<int>(range.begin), tile.begin) ||
              token >= min(static_cast<int>(range.end), tile.end)) {
            logit = merge::kEmptyMax;
          }
        }
        s[t][i] = logit;
      }
    }
  }

  // Logits become weights; m, l and o move to the new maximum.
  __device__ void weigh(float (&s)[2][4]) {
    float shrink[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = 2 * half;
      float top = fmaxf(fmaxf(s[0][i], s[0][i + 1]), fmaxf(s[1][i], s[1][i + 1]));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      top = fmaxf(top, m[half]);
      const bool empty = top == merge::kEmptyMax;
      const float reference = empty ? 0.0f : top;
      shrink[half] = m[half] == merge::kEmptyMax ? 1.0f : merge::state_weight(m[half], reference);
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
    if (__any_sync(~0u, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        o[n][0] *= shrink[0];
        o[n][1] *= shrink[0];
        o[n][2] *= shrink[1];
        o[n][3] *= shrink[1];
      }
    }
  }

  // o += weights * V. A weight is two numbers of T, so that rounding it costs 2^-16 and not 2^-9.
  __device__ void add_values(const float (&s)[2][4], std::uint32_t v_address) {
    std::uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float a = s[i / 2][i % 2 * 2], b = s[i / 2][i % 2 * 2 + 1];
      high[i] = pack<T>(a, b);
      const float2 rounded = unpack<T>(high[i]);
      low[i] = pack<T>(a - rounded.x, b - rounded.y);
    }
    const int matrix = lane / 8;
    const std::uint32_t v_row = v_address + ((matrix % 2) * 8 + lane % 8) * Layout::kRowBytes + (matrix / 2) * 16;
    // Eight columns of two: the second product of a column must not wait for the first.
    constexpr int kBatch = kColumns % 8 == 0 ? 4 : 1;
#pragma unroll
    for (int pair = 0; pair < kColumns / 2; pair += kBatch) {
      std::uint32_t b[kBatch][4];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) load_matrices_transposed(b[i], v_row + (pair + i) * 32);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        multiply_add<T>(o[2 * (pair + i)], high, b[i][0], b[i][1]);
        multiply_add<T>(o[2 * (pair + i) + 1], high, b[i][2], b[i][3]);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        multiply_add<T>(o[2 * (pair + i)], low, b[i][0], b[i][1]);
        multiply_add<T>(o[2 * (pair + i) + 1], low, b[i][2], b[i][3]);
      }
    }
  }

  const AttentionParams& p;
  const WorkItem& item;
  const int lane, warp;
  const RowSource k_rows, v_rows;
  const std::uint32_t ring_address;
  std::uint32_t q[kSteps][4];
  float o[kColumns][4];
  float m[2], l[2];  // l: this thread's keys only
};

// The level of the lowest node above two different leaves.
__device__ inline int meeting_level(int a, int b) { return 32 - __clz(a ^ b); }

template <class T, int kDim, int kStages>
__global__ void __launch_bounds__(kMmaThreads, 2) decode_mma_kernel(const __grid_constant__ AttentionParams p) {
  using Layout = MmaLayout<kDim, kStages>;
  constexpr int kRowFloats = kDim + 2;
  extern __shared__ __align__(16) std::byte memory[];
  const WorkItem item = p.items[blockIdx.x];
  const int rows = item.rows();
  const int block = rows * kRowFloats;
  const int number = threadIdx.x / 32;
  ItemKeys keys = keys_of(p, item);
  // The warps share the leaves of the item; where there are fewer leaves than warps, some have none.
  keys.leaves = max(1, item.leaves / kMmaWarps);
  keys.first_leaf = item.first_leaf + number * keys.leaves;
  if (number * keys.leaves >= item.leaves) keys.leaves = 0;
  const int slots = Layout::slots(max(1, item.leaves / kMmaWarps));
  float* const nodes = reinterpret_cast<float*>(memory + Layout::kRingBytes);  // [warps, slots, rows, kRowFloats]
  float* const kept = nodes + number * slots * block;

  MmaWarp<T, kDim, kStages> warp(p, item, memory);
  TileCursor ahead;
  ahead.next_leaf(keys, p.order);
  TileCursor tile = ahead;
  int filling = 0;
  const auto start_next = [&] {
    if (!ahead.done) {
      warp.prefetch(ahead, filling);
      ahead.next(keys, p.order);
    }
    commit_async();  // also where there is nothing: groups are counted
    filling = filling + 1 == kStages ? 0 : filling + 1;
  };
  for (int i = 0; i < kStages - 1; ++i) start_next();

  int stage = 0, depth = 0;
  int leaf_at[2] = {0, 0};  // of the kept states
  warp.clear();
  while (!tile.done) {
    const int leaf = tile.leaf;
    do {
      start_next();
      wait_async<kStages - 1>();
      __syncwarp();
      const bool whole =
          tile.first >= max(keys.all_begin, tile.begin) && tile.first + kMmaTile <= min(keys.all_end, tile.end);
      warp.fold(tile, stage, whole);
      __syncwarp();
      stage = stage + 1 == kStages ? 0 : stage + 1;
      tile.next(keys, p.order);
    } while (!tile.done && tile.leaf == leaf);
    warp.finish_leaf();
    // A kept state is merged as soon as no later leaf belongs between it and this one.
    while (depth > 0) {
      const int before = depth == 2 ? leaf_at[1] : leaf_at[0];
      if (!tile.done && meeting_level(before, leaf) > meeting_level(leaf, tile.leaf)) break;
      warp.merge_with(kept + --depth * block, rows);
    }
    __syncwarp();
    if (tile.done) break;
    warp.keep(kept + depth * block, rows);
    depth == 0 ? leaf_at[0] = leaf : leaf_at[1] = leaf;
    ++depth;
    __syncwarp();
    warp.clear();
  }
  warp.keep(kept, rows);
  wait_async<0>();
  __syncthreads();
  // The ring is free now.
  float* const root = reinterpret_cast<float*>(memory);
  merge_tree<kMmaWarps>(nodes, slots * block, rows, kRowFloats, root);

  const std::int64_t slot = p.groups[item.group].first_item + item.place;
  float* to = p.item_states + slot * (static_cast<std::int64_t>(p.rows_per_item) * kRowFloats);
  bool finite = true;
  for (int i = threadIdx.x; i < block; i += kMmaThreads) {
    to[i] = root[i];
    finite = finite && (i % kRowFloats == 0 || isfinite(root[i]));
  }
  // Limbs of a weight times infinity, or a hidden NaN times zero, are not what they stand for: once more, plainly.
  if (__syncthreads_or(!finite)) {
    const GenericScratch scratch(reinterpret_cast<float*>(memory), rows, kDim);
    generic_node(p, item, scratch);
    __syncthreads();
    for (int r = 0; r < rows; ++r) {
      bool good = true;
      for (int i = threadIdx.x + 1; i < kRowFloats; i += kMmaThreads) good = good && isfinite(to[r * kRowFloats + i]);
      if (__syncthreads_and(good)) continue;
      for (int i = threadIdx.x; i < kRowFloats; i += kMmaThreads) {
        to[r * kRowFloats + i] = scratch.stack[r * kRowFloats + i];
      }
    }
    __syncthreads();
  }
  finish_item(p, item, reinterpret_cast<float*>(memory));
}

template <class T, int kDim, int kStages>
Launch decode_mma_launch(int rows, int leaves) {
  const auto kernel = decode_mma_kernel<T, kDim, kStages>;
  return {kernel, kMmaThreads, MmaLayout<kDim, kStages>::shared_bytes(rows, leaves), "mma"};
}

}  // namespace treeattn::kernels::cuda
