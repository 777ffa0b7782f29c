// SPDX-License-Identifier: Apache-2.0
// The state of one node of the tree by plain float32 arithmetic: any type, any head dim, any mask. Correct first; the
// tensor-core kernels fall back to it where a number is not finite.
#pragma once

#include "kernels/cuda/merge_tail.cuh"

namespace treeattn::kernels::cuda {

inline constexpr int kGenericTile = 64;   // keys worked on together, on the grid of global positions
inline constexpr int kGenericRows = 16;   // most rows of an item
inline constexpr int kGenericLevels = 4;  // log2 of the most leaves with keys of an item, unless said
inline constexpr int kMostLevels = 16;    // of any tree

// Shared memory of one block.
struct GenericScratch {
  float* q;       // [rows, k_dim]
  float* weight;  // [rows, kGenericTile] logits, then weights
  float* shrink;  // [rows]
  float* stack;   // [levels + 1, rows] states; the leaf in the making lies on top

  __host__ __device__ static std::size_t floats(int rows, int k_dim, int v_dim, int levels = kGenericLevels) {
    return static_cast<std::size_t>(rows) * (k_dim + kGenericTile + 1 + (levels + 1) * row_state_floats(v_dim));
  }
  __device__ GenericScratch(float* memory, int rows, int k_dim)
      : q(memory), weight(q + rows * k_dim), shrink(weight + rows * kGenericTile), stack(shrink + rows) {}
};

// The logit of a key in log2 units; -inf where the row does not see it.
__device__ inline float generic_logit(const AttentionParams& p, const WorkItem& item, const GenericScratch& scratch,
                                      int r, std::int64_t token) {
  const int query = query_of(item, r);
  const Range seen = visible(p, item.batch, query);
  if (token < seen.begin || token >= seen.end) return merge::kEmptyMax;
  const int kv_head = kv_head_of(p, item, r);
  const std::byte* row = kv_row(p.k, item.batch, token, kv_head);
  float dot = 0.0f;
  for (int d = 0; d < p.k.dim; ++d) dot = __fmaf_rn(scratch.q[r * p.k.dim + d], load_element(row, d, p.k.dtype), dot);
  dot *= kv_scale(p.k, item.batch, token, kv_head);
  float logit = p.softcap > 0 ? tanhf(dot * (p.scale / p.softcap)) * (p.softcap * merge::kLog2E)
                              : dot * (p.scale * merge::kLog2E);
  if (p.alibi_slopes != nullptr) {
    const std::int64_t distance = p.first_key + token - (p.first_query[item.batch] + query);
    logit = __fmaf_rn(p.alibi_slopes[head_of(p, item, r)] * merge::kLog2E, static_cast<float>(distance), logit);
  }
  return logit;
}

// Folds the keys [first, first + count), at most a tile, into the states `top` [rows].
__device__ inline void generic_tile(const AttentionParams& p, const WorkItem& item, const GenericScratch& scratch,
                                    int rows, std::int64_t first, int count, float* top) {
  const int row_floats = row_state_floats(p.v.dim);
  for (int i = threadIdx.x; i < rows * kGenericTile; i += blockDim.x) {
    const int r = i / kGenericTile, t = i % kGenericTile;
    scratch.weight[i] = t < count ? generic_logit(p, item, scratch, r, first + t) : merge::kEmptyMax;
  }
  __syncthreads();
  for (int r = threadIdx.x; r < rows; r += blockDim.x) {
    float& state_m = top[r * row_floats + p.v.dim];
    float& state_l = top[r * row_floats + p.v.dim + 1];
    float* weight = scratch.weight + r * kGenericTile;
    float m = state_m;
    // A NaN must not be passed over, whatever follows it.
    for (int t = 0; t < count; ++t) m = weight[t] > m || isnan(weight[t]) ? weight[t] : m;
    float sum = 0.0f;
    const float shrink = state_m == merge::kEmptyMax ? 0.0f : merge::state_weight(state_m, m);
    for (int t = 0; t < count; ++t) {
      // Hidden, or infinitely unlikely: selected away, not multiplied.
      weight[t] = weight[t] == merge::kEmptyMax ? 0.0f : merge::state_weight(weight[t], m);
      sum += weight[t];
    }
    scratch.shrink[r] = shrink;
    if (m != merge::kEmptyMax) {
      state_l = state_m == merge::kEmptyMax ? sum : __fmaf_rn(state_l, shrink, sum);
      state_m = m;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < rows * p.v.dim; i += blockDim.x) {
    const int r = i / p.v.dim, d = i % p.v.dim, kv_head = kv_head_of(p, item, r);
    float* o = top + r * row_floats + d;
    float sum = *o * scratch.shrink[r];
    for (int t = 0; t < count; ++t) {
      const float weight = scratch.weight[r * kGenericTile + t];
      if (weight == 0.0f) continue;
      const float value = load_element(kv_row(p.v, item.batch, first + t, kv_head), d, p.v.dtype);
      sum = __fmaf_rn(weight * kv_scale(p.v, item.batch, first + t, kv_head), value, sum);
    }
    *o = sum;
  }
  __syncthreads();
}

// Leaves the states of the item's node in scratch.stack [rows]. Called by all threads of the block.
__device__ inline void generic_node(const AttentionParams& p, const WorkItem& item, const GenericScratch& scratch) {
  const int rows = item.rows();
  const int row_floats = row_state_floats(p.v.dim);
  const int block = rows * row_floats;
  for (int i = threadIdx.x; i < rows * p.k.dim; i += blockDim.x) {
    const int r = i / p.k.dim;
    const std::byte* row = query_row(p, item.batch, query_of(item, r), head_of(p, item, r));
    scratch.q[i] = load_element(row, i % p.k.dim, p.q_dtype);
  }
  const Range seen = ItemRanges(p, SequenceFacts::of(p, item.batch), item).any;
  const std::int64_t from = plan::chunk_of(p.order, p.first_key + seen.begin);
  const std::int64_t last = seen.begin < seen.end ? plan::chunk_of(p.order, p.first_key + seen.end - 1) : -1;
  const auto next_used = [&](int leaf) {
    while (++leaf < item.leaves && plan::first_chunk(p.order, item.first_leaf + leaf, from) > last) {
    }
    return leaf;
  };
  const auto clear = [&](float* state) {
    for (int i = threadIdx.x; i < block; i += blockDim.x)
      state[i] = i % row_floats == p.v.dim ? merge::kEmptyMax : 0.0f;
    __syncthreads();
  };
  int leaf = next_used(-1);
  if (leaf >= item.leaves) clear(scratch.stack);
  int leaves[kMostLevels + 1];  // of the stack
  for (int depth = 0; leaf < item.leaves;) {
    float* top = scratch.stack + depth * block;
    clear(top);
    const int number = item.first_leaf + leaf;
    for (std::int64_t chunk = plan::first_chunk(p.order, number, from); chunk <= last;
         chunk = plan::next_chunk(p.order, number, chunk)) {
      const std::int64_t begin = max(seen.begin, chunk * p.order.chunk_tokens - p.first_key);
      const std::int64_t end = min(seen.end, (chunk + 1) * p.order.chunk_tokens - p.first_key);
      for (std::int64_t first = begin; first < end;) {
        const std::int64_t grid = kGenericTile - (p.first_key + first) % kGenericTile;
        const int count = static_cast<int>(min(end - first, grid));
        generic_tile(p, item, scratch, rows, first, count, top);
        first += count;
      }
    }
    const int next = next_used(leaf);
    leaves[depth++] = leaf;
    while (depth > 1 && !waits(leaves[depth - 2], leaf, next < item.leaves ? next : -1)) {
      --depth;
      float* lower = scratch.stack + (depth - 1) * block;
      merge_blocks(
          1, rows, p.v.dim, [&](int) { return lower; }, [&](int) { return lower + block; });
    }
    leaf = next;
  }
}

}  // namespace treeattn::kernels::cuda
