// SPDX-License-Identifier: Apache-2.0
// How a block ends: it stores the state of its node, and the last block of a group merges them all. No second launch,
// no host in between.
#pragma once

#include "base/half.h"
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

// o / l, rounded as `/` does, of moderate numbers: no remainder is too small to be exact, nothing overflows on the way.
__device__ inline bool is_moderate(float x) { return fabsf(x) >= 0x1p-60f && fabsf(x) <= 0x1p60f; }
__device__ inline float4 moderate_quotients(const float4& o, float l) {
  float inverse;
  asm("rcp.approx.f32 %0, %1;" : "=f"(inverse) : "f"(l));
  inverse = __fmaf_rn(inverse, __fmaf_rn(-l, inverse, 1.0f), inverse);
  const auto quotient = [&](float x) {
    float q = x * inverse;
    q = __fmaf_rn(__fmaf_rn(-l, q, x), inverse, q);
    return __fmaf_rn(__fmaf_rn(-l, q, x), inverse, q);
  };
  return make_float4(quotient(o.x), quotient(o.y), quotient(o.z), quotient(o.w));
}

// Columns [column, column + 4) of the result of a row, from its state: as a state, or finished.
__device__ inline void store_result(const AttentionParams& p, int node, std::int64_t row, int column, float m, float l,
                                    float4 o) {
  if (p.states != nullptr) {
    float* to = p.states + (node * p.rows + row) * (p.v.dim + 2);
    if (column == 0) {
      to[0] = m;
      to[1] = l;
    }
    to += 2 + column;
    to[0] = o.x;
    to[1] = o.y;
    to[2] = o.z;
    to[3] = o.w;
    return;
  }
  if (p.sinks != nullptr) {
    // A sink is the state of one key whose value is zero.
    const MergeWeights weights = MergeWeights::of(m, p.sinks[row % p.heads] * merge::kLog2E, m);
    l = weights.merged(l, 1.0f);
    o = weights.merged(o, make_float4(0, 0, 0, 0));
  }
  // Of most rows all of it at once: quotients and lse one after the other, each with a look at its numbers, took three
  // times as long, and nothing else goes on at the end of a call.
  float4 value;
  float lse;
  if (is_moderate(l) && is_moderate(o.x) && is_moderate(o.y) && is_moderate(o.z) && is_moderate(o.w)) {
    value = moderate_quotients(o, l);
    lse = merge::usual_row_lse(m, l);
  } else {
    const bool empty = m == merge::kEmptyMax;
    value = empty ? make_float4(0, 0, 0, 0) : make_float4(o.x / l, o.y / l, o.z / l, o.w / l);
    lse = empty ? merge::kEmptyMax : merge::row_lse(m, l);
  }
  float* to = p.out + row * p.v.dim + column;
  to[0] = value.x;
  to[1] = value.y;
  to[2] = value.z;
  to[3] = value.w;
  if (column == 0 && p.lse != nullptr) p.lse[row] = lse;
  if (p.rounded_out == nullptr) return;
  std::uint16_t* rounded = p.rounded_out + row * p.v.dim + column;
  rounded[0] = base::float_to_bfloat16(value.x);
  rounded[1] = base::float_to_bfloat16(value.y);
  rounded[2] = base::float_to_bfloat16(value.z);
  rounded[3] = base::float_to_bfloat16(value.w);
}

// m and l of state lane % kCount become those of all kCount, in every lane. Returns the weights of the merge at which
// the lane's state begins the higher side.
template <int kCount>
__device__ inline MergeWeights merge_sums(int lane, float& m, float& l) {
  MergeWeights kept{1.0f, 1.0f};
#pragma unroll
  for (int width = 1; width < kCount; width *= 2) {
    const float other_m = __shfl_xor_sync(~0u, m, width), other_l = __shfl_xor_sync(~0u, l, width);
    const bool higher = (lane & width) != 0;
    const MergeWeights w = MergeWeights::of(higher ? other_m : m, higher ? m : other_m, m);
    l = w.merged(higher ? other_l : l, higher ? l : other_l);
    if (lane % (2 * width) == width) kept = w;
  }
  return kept;
}

// Merges kCount states of every row, `stride` floats apart, along the tree, and stores the result, or, where the group
// has more, the state in place of the first. A warp takes a row and needs nobody else. Lane k has m and l of state
// k % kCount; all lanes find m and l of the row together, and each keeps the weights of the merge at which its state
// begins the higher side. Meanwhile the values are on their way, four columns of every state a lane.
template <int kCount, bool kInPlace = false>
__device__ void merge_group(const AttentionParams& p, const WorkItem& item, float* states, std::int64_t stride) {
  const int lane = static_cast<int>(threadIdx.x) % 32, units = p.v.dim / 4;
  for (int r = static_cast<int>(threadIdx.x) / 32; r < item.rows(); r += static_cast<int>(blockDim.x) / 32) {
    float* const row = states + r * row_state_floats(p.v.dim);
    const float2 own = __ldcg(reinterpret_cast<const float2*>(row + lane % kCount * stride + p.v.dim));
    float4 value[kCount];
    const auto load = [&](int unit) {
      const float* from = row + min(unit, units - 1) * 4;  // what lanes behind the last have is dropped
#pragma unroll
      for (int k = 0; k < kCount; ++k) value[k] = __ldcg(reinterpret_cast<const float4*>(from + k * stride));
    };
    load(lane);
    float m = own.x, l = own.y;
    const MergeWeights kept = merge_sums<kCount>(lane, m, l);
#pragma unroll 1
    for (int first = 0; first < units; first += 32) {
      if (first > 0) load(first + lane);
#pragma unroll
      for (int width = 1; width < kCount; width *= 2) {
#pragma unroll
        for (int k = 0; k < kCount; k += 2 * width) {
          const MergeWeights w{__shfl_sync(~0u, kept.lower, k + width), __shfl_sync(~0u, kept.higher, k + width)};
          value[k] = w.merged(value[k], value[k + width]);
        }
      }
      const int column = (first + lane) * 4;
      if (first + lane >= units) continue;
      if constexpr (kInPlace) {
        *reinterpret_cast<float4*>(row + column) = value[0];
        if (column == 0) *reinterpret_cast<float2*>(row + p.v.dim) = make_float2(m, l);
      } else {
        store_result(p, item.node, global_row(p, item, r), column, m, l, value[0]);
      }
    }
  }
}

// The same for twice kMergeAtOnce states of 64 columns: either half of a warp takes half of them.
__device__ inline void merge_wide_group(const AttentionParams& p, const WorkItem& item, const float* states,
                                        std::int64_t stride) {
  constexpr int kDim = 64, kCount = kMergeAtOnce;
  const int lane = static_cast<int>(threadIdx.x) % 32, unit = lane % 16;
  const bool upper = lane >= 16;
  for (int r = static_cast<int>(threadIdx.x) / 32; r < item.rows(); r += static_cast<int>(blockDim.x) / 32) {
    const float* const row = states + r * row_state_floats(kDim);
    const float* const from = row + (upper ? kCount * stride : 0) + unit * 4;
    float m[2], l[2];
    MergeWeights kept[2];
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const float2 own = __ldcg(reinterpret_cast<const float2*>(row + (side * kCount + lane) * stride + kDim));
      m[side] = own.x;
      l[side] = own.y;
    }
    float4 value[kCount];
#pragma unroll
    for (int k = 0; k < kCount; ++k) value[k] = __ldcg(reinterpret_cast<const float4*>(from + k * stride));
#pragma unroll
    for (int side = 0; side < 2; ++side) kept[side] = merge_sums<kCount>(lane, m[side], l[side]);
#pragma unroll
    for (int width = 1; width < kCount; width *= 2) {
#pragma unroll
      for (int k = 0; k < kCount; k += 2 * width) {
        MergeWeights w[2];
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          w[side] = {__shfl_sync(~0u, kept[side].lower, k + width), __shfl_sync(~0u, kept[side].higher, k + width)};
        }
        value[k] = (upper ? w[1] : w[0]).merged(value[k], value[k + width]);
      }
    }
    const float4 others = make_float4(__shfl_xor_sync(~0u, value[0].x, 16), __shfl_xor_sync(~0u, value[0].y, 16),
                                      __shfl_xor_sync(~0u, value[0].z, 16), __shfl_xor_sync(~0u, value[0].w, 16));
    float top;
    const MergeWeights w = MergeWeights::of(m[0], m[1], top);
    if (!upper) {
      store_result(p, item.node, global_row(p, item, r), unit * 4, top, w.merged(l[0], l[1]),
                   w.merged(value[0], others));
    }
  }
}

// The result of a group of 1, 2, 4, ... kMergeAtOnce items.
__device__ inline void merge_group(const AttentionParams& p, const WorkItem& item, float* states, std::int64_t stride,
                                   int count) {
  switch (count) {
    case 1:
      return merge_group<1>(p, item, states, stride);
    case 2:
      return merge_group<2>(p, item, states, stride);
    case 4:
      return merge_group<4>(p, item, states, stride);
    case 8:
      return merge_group<8>(p, item, states, stride);
    case 16:
      return merge_group<16>(p, item, states, stride);
    default:
      return merge_group<kMergeAtOnce>(p, item, states, stride);
  }
}

// Called by all threads of a block, behind a barrier, once it has written what others need: whether it is the last of
// `count` blocks to come. It can then read what all of them wrote.
__device__ inline bool is_last(unsigned* counter, int count) {
  bool last = false;
  if (threadIdx.x == 0) {
    unsigned before;  // releases what the block wrote before the barrier, acquires what others released
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;\n" : "=r"(before) : "l"(counter) : "memory");
    last = before + 1 == static_cast<unsigned>(count);
    if (last) *counter = 0;  // for the next call
  }
  return __syncthreads_or(last);
}

// Floats of the states of an item.
__device__ inline std::int64_t state_stride(const AttentionParams& p) {
  return static_cast<std::int64_t>(p.rows_per_item) * row_state_floats(p.v.dim);
}

// Where the block of an item puts them.
__device__ inline float* states_of_item(const AttentionParams& p, const WorkItem& item) {
  const std::int64_t slot = item.group_slot + item.place;
  return p.item_states + slot * state_stride(p);
}

// The end of an item in a group of more than kMergeAtOnce: the last block of every run of so many makes their states
// one, and so on. A run is counted where its first item would be, one further at every level. By value: an item whose
// address is taken is not in registers.
__device__ __noinline__ inline void finish_in_runs(const AttentionParams& p, WorkItem item) {
  std::int64_t stride = state_stride(p);
  float* const states = p.item_states + item.group_slot * stride;
  unsigned* counters = p.arrived + item.group_slot;
  int count = item.group_items, run = item.place / kMergeAtOnce, run_items = kMergeAtOnce;
  for (; count > kMergeAtOnce; run /= kMergeAtOnce, run_items *= kMergeAtOnce, ++counters) {
    if (!is_last(counters + run * run_items, kMergeAtOnce)) return;
    merge_group<kMergeAtOnce, true>(p, item, states + run * kMergeAtOnce * stride, stride);
    __syncthreads();
    count /= kMergeAtOnce;
    stride *= kMergeAtOnce;
  }
  if (is_last(counters, count)) merge_group(p, item, states, stride, count);
}

// Called by all threads of the block, behind a barrier, once item_states of this block's item is written. kWide: where
// there may be groups for merge_wide_group, which takes more registers.
template <bool kWide = false>
__device__ inline void finish_item(const AttentionParams& p, const WorkItem& item) {
  const int count = item.group_items;
  const bool wide = kWide && count == 2 * kMergeAtOnce;
  if (count > kMergeAtOnce && !wide) return finish_in_runs(p, item);
  if (count > 1 && !is_last(p.arrived + item.group_slot, count)) return;
  const std::int64_t stride = state_stride(p);
  float* const states = p.item_states + item.group_slot * stride;
  if (wide) return merge_wide_group(p, item, states, stride);
  merge_group(p, item, states, stride, count);
}

}  // namespace treeattn::kernels::cuda
