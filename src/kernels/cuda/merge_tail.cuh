// SPDX-License-Identifier: Apache-2.0
// How a block ends: it stores the state of its node, and the last block of a group merges them all. No second launch,
// no host in between.
#pragma once

#include "kernels/cuda/device_rows.cuh"
#include "merge/operator.h"

namespace treeattn::kernels::cuda {

// Whether the state of leaf `before` waits on when `leaf` is done and `next` (-1: none) follows: a later leaf then
// belongs between the two and their merge.
__device__ inline bool waits(int before, int leaf, int next) {
  const auto meeting_level = [](int a, int b) { return 32 - __clz(a ^ b); };
  return next >= 0 && meeting_level(before, leaf) > meeting_level(leaf, next);
}

// What the two sides of a merge weigh. An empty side of these kernels holds zeros, and +0 times -0 added to a number
// leaves every bit of it: no branch is needed to select it away.
struct MergeWeights {
  float lower, higher;
  __device__ static MergeWeights of(float m_lower, float m_higher, float& m) {
    m = m_lower;
    if (m_higher == merge::kEmptyMax) return {1.0f, -0.0f};
    m = m_higher;
    if (m_lower == merge::kEmptyMax) return {-0.0f, 1.0f};
    m = merge::ScalarOps::max(m_lower, m_higher);
    return {merge::state_weight(m_lower, m), merge::state_weight(m_higher, m)};
  }
  __device__ float merged(float low, float high) const {
    return merge::merge_component<merge::ScalarOps>(low, lower, high, higher);
  }
  __device__ float4 merged(const float4& low, const float4& high) const {
    return make_float4(merged(low.x, high.x), merged(low.y, high.y), merged(low.z, high.z), merged(low.w, high.w));
  }
};

// lower(i) = merge(lower(i), higher(i)) for `blocks` blocks of `rows` states each, `lower` and `higher` giving their
// addresses. Called by all threads of the block. The maxima come last: the other components need the old ones.
template <class Lower, class Higher>
__device__ void merge_blocks(int blocks, int rows, int v_dim, const Lower& lower, const Higher& higher) {
  const int parts = v_dim + 1;
  for (int i = threadIdx.x; i < blocks * rows * parts; i += blockDim.x) {
    const int block = i / (rows * parts), row = i / parts % rows * row_state_floats(v_dim);
    const int c = i % parts < v_dim ? i % parts : v_dim + 1;
    float* low = lower(block) + row;
    const float* high = higher(block) + row;
    float m;
    low[c] = MergeWeights::of(low[v_dim], high[v_dim], m).merged(low[c], high[c]);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < blocks * rows; i += blockDim.x) {
    const int m = i % rows * row_state_floats(v_dim) + v_dim;
    MergeWeights::of(lower(i / rows)[m], higher(i / rows)[m], lower(i / rows)[m]);
  }
  __syncthreads();
}

// Columns [column, column + 4) of the result of a row, from its state: as a state, or finished.
__device__ inline void store_result(const AttentionParams& p, int node, std::int64_t row, int column, float m, float l,
                                    const float4& o) {
  const float values[4] = {o.x, o.y, o.z, o.w};
  if (p.states != nullptr) {
    float* to = p.states + (node * p.rows + row) * (p.v.dim + 2);
    if (column == 0) {
      to[0] = m;
      to[1] = l;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) to[2 + column + i] = values[i];
    return;
  }
  // A sink is the state of one key whose value is zero.
  const float sink = p.sinks != nullptr ? p.sinks[row % p.heads] * 0x1.715476p+0f : merge::kEmptyMax;
  float top;
  const MergeWeights weights = MergeWeights::of(m, sink, top);
  const float sum = weights.merged(l, 1.0f);
  const bool empty = top == merge::kEmptyMax;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    p.out[row * p.v.dim + column + i] = empty ? 0.0f : weights.merged(values[i], 0.0f) / sum;
  }
  if (column == 0 && p.lse != nullptr) {
    constexpr double kLn2 = 0x1.62e42fefa39efp-1;
    p.lse[row] = empty ? merge::kEmptyMax : static_cast<float>(top * kLn2 + log(static_cast<double>(sum)));
  }
}

// Shared memory to merge kMergeAtOnce states a row: m, l, and two weights.
__host__ __device__ inline std::size_t merge_floats(int rows) {
  return static_cast<std::size_t>(rows) * 4 * kMergeAtOnce;
}

// Merges kCount states [rows], `stride` floats apart, along the tree, and stores the result. The loads of the values
// are on their way while the maxima give every merge its weights.
template <int kCount>
__device__ void merge_group(const AttentionParams& p, const WorkItem& item, int node, const float* states,
                            std::int64_t stride, float* scratch) {
  const int rows = item.rows(), row_floats = row_state_floats(p.v.dim), units = p.v.dim / 4;
  float* const top = scratch;                                                  // [kCount, rows]
  float* const sum = top + kCount * rows;                                      // [kCount, rows]
  auto* const weights = reinterpret_cast<MergeWeights*>(sum + kCount * rows);  // [kCount - 1, rows]
  for (int i = threadIdx.x; i < kCount * rows; i += blockDim.x) {
    const float* at = states + i / rows * stride + i % rows * row_floats + p.v.dim;
    const float2 from = __ldcg(reinterpret_cast<const float2*>(at));
    top[i] = from.x;
    sum[i] = from.y;
  }
  float4 value[kCount];
  const auto load = [&](int unit) {
    const float* from = states + unit / units * row_floats + unit % units * 4;
#pragma unroll
    for (int k = 0; k < kCount; ++k) value[k] = __ldcg(reinterpret_cast<const float4*>(from + k * stride));
  };
  int unit = threadIdx.x;
  if (unit < rows * units) load(unit);
  __syncthreads();
  int done = 0;
#pragma unroll 1
  for (int width = 1; width < kCount; width *= 2) {
    const int pairs = kCount / (2 * width);
    for (int i = threadIdx.x; i < pairs * rows; i += blockDim.x) {
      const int low = i / rows * 2 * width * rows + i % rows, high = low + width * rows;
      const MergeWeights w = MergeWeights::of(top[low], top[high], top[low]);
      weights[(done + i / rows) * rows + i % rows] = w;
      sum[low] = w.merged(sum[low], sum[high]);
    }
    done += pairs;
    __syncthreads();
  }
  while (unit < rows * units) {
    const int r = unit / units;
    const MergeWeights* weight = weights + r;
#pragma unroll
    for (int width = 1; width < kCount; width *= 2) {
#pragma unroll
      for (int k = 0; k < kCount; k += 2 * width) {
        value[k] = weight->merged(value[k], value[k + width]);
        weight += rows;
      }
    }
    store_result(p, node, global_row(p, item, r), unit % units * 4, top[r], sum[r], value[0]);
    unit += blockDim.x;
    if (unit < rows * units) load(unit);
  }
}

// More states than are merged at once: pair by pair where they lie.
__device__ __noinline__ inline void merge_pairs(float* states, std::int64_t stride, int count, int rows, int v_dim) {
  const auto lower = [&](int pair) { return states + pair * 2 * stride; };
  merge_blocks(count / 2, rows, v_dim, lower, [&](int pair) { return lower(pair) + stride; });
}

// Called by all threads of the block once item_states of this block's item is written. scratch: merge_floats of shared
// memory.
__device__ inline void finish_item(const AttentionParams& p, const WorkItem& item, float* scratch) {
  const MergeGroup group = p.groups[item.group];
  std::int64_t stride = static_cast<std::int64_t>(p.rows_per_item) * row_state_floats(p.v.dim);
  float* states = p.item_states + group.first_item * stride;
  __syncthreads();
  if (group.items > 1) {
    bool last = false;
    if (threadIdx.x == 0) {
      // Releases what the block wrote before the barrier, acquires what others released.
      unsigned before;
      asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;\n"
                   : "=r"(before)
                   : "l"(p.arrived + item.group)
                   : "memory");
      last = before + 1 == static_cast<unsigned>(group.items);
      if (last) p.arrived[item.group] = 0;  // for the next call
    }
    if (!__syncthreads_or(last)) return;
  }
  int count = group.items;
  for (; count > kMergeAtOnce; count /= 2, stride *= 2) merge_pairs(states, stride, count, item.rows(), p.v.dim);
  switch (count) {
    case 1:
      return merge_group<1>(p, item, group.node, states, stride, scratch);
    case 2:
      return merge_group<2>(p, item, group.node, states, stride, scratch);
    case 4:
      return merge_group<4>(p, item, group.node, states, stride, scratch);
    case 8:
      return merge_group<8>(p, item, group.node, states, stride, scratch);
    case 16:
      return merge_group<16>(p, item, group.node, states, stride, scratch);
    default:
      return merge_group<32>(p, item, group.node, states, stride, scratch);
  }
}

}  // namespace treeattn::kernels::cuda
