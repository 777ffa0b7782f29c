// SPDX-License-Identifier: Apache-2.0
// The state (m, l, o) of a leaf in the registers of a warpgroup, how it is merged with those that waited for it, and
// where it waits itself: in shared memory for the very next leaf, in the workspace for others.
#pragma once

#include "kernels/cuda/merge_tail.cuh"
#include "kernels/cuda/prefill/prefill_elements.cuh"
#include "kernels/cuda/prefill/prefill_ring.cuh"

namespace treeattn::kernels::cuda {

// What a thread of a warpgroup has of the states of 64 rows: of rows 16 warp + lane / 4 and that plus 8, as the sums of
// products lie (warpgroup.cuh).
template <class Elements, int kDim>
class PrefillState {
 public:
  __device__ __forceinline__ PrefillState(const AttentionParams& params, std::byte* shared, int number)
      : p(params),
        group(number),
        thread(static_cast<int>(threadIdx.x) % 128),
        lane(static_cast<int>(threadIdx.x) % 32),
        next_leaf(reinterpret_cast<float4*>(shared + PrefillLayout<Elements, kDim>::kWaiting) + number * kUnits * 128 +
                  thread) {}

  float o[kDim / 2];
  float m[2], l[2];      // l: this thread's keys only, until the leaf ends
  unsigned waiting = 0;  // bit i: a state waits for one that it meets at level i + 1

  // Of the item.
  __device__ __forceinline__ int row_of(int half) const { return group * 64 + thread / 32 * 16 + lane / 4 + half * 8; }
  // No keys yet; o is left to the first product.
  __device__ __forceinline__ void clear() {
    m[0] = m[1] = merge::kEmptyMax;
    l[0] = l[1] = 0.0f;
  }
  __device__ __forceinline__ void set_sums(const float (&new_m)[2], const float (&new_l)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      m[half] = new_m[half];
      l[half] = new_l[half];
    }
  }
  __device__ __forceinline__ void rescale(const float (&shrink)[2]) {
    if (!__any_sync(~0u, shrink[0] != 1.0f || shrink[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) o[i] *= shrink[i / 2 % 2];
  }

  // The state is that of a whole leaf: it is merged with what waited for it, and waits for the next.
  __device__ __forceinline__ void end_leaf(const PrefillNote& note) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      l[half] += __shfl_xor_sync(~0u, l[half], 1);
      l[half] += __shfl_xor_sync(~0u, l[half], 2);
    }
    if constexpr (Elements::kShift != 0.0f) {
      static_assert(Elements::kShift == 14.0f);
      constexpr float kUnit = 0x1p-14f;
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) o[i] *= kUnit;
      l[0] *= kUnit;
      l[1] *= kUnit;
    }
    // Where this leaf and the next meet. What waits meets this leaf at the level of its bit, and is merged as soon as
    // no later leaf belongs between the two (merge_tail.cuh, waits).
    const int meeting = note.next < 0 ? 32 : 32 - __clz(note.leaf ^ note.next);
    while (waiting != 0 && __ffs(static_cast<int>(waiting)) <= meeting) {
      const int level = __ffs(static_cast<int>(waiting));
      if (level == note.level) {
        merge_with(next_leaf, next_leaf_sums);
      } else {
        const float4* from = slot(level);
        merge_with(from, from[kUnits * 128]);
      }
      waiting &= waiting - 1;
    }
    if (note.next < 0) return;
    if (meeting == note.level) {
      next_leaf_sums = make_float4(m[0], m[1], l[0], l[1]);
      push(next_leaf);
    } else {
      float4* to = slot(meeting);
      to[kUnits * 128] = make_float4(m[0], m[1], l[0], l[1]);
      push(to);
    }
    waiting |= 1u << (meeting - 1);
  }

  // The item is done.
  __device__ __forceinline__ void store(const PrefillItem& item) const {
    // Logits beyond 2^31 or so are rounded by more than weights have room for: then all may vanish, too.
    bool sound[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sound[half] = isfinite(l[half]) && (l[half] > 0.0f || m[half] == merge::kEmptyMax);
    }
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) sound[i / 2 % 2] = sound[i / 2 % 2] && isfinite(o[i]);
    std::int64_t to[2];
    bool there[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of(half);
      there[half] = row < item.item.queries;
      to[half] = global_row(p, item.item, there[half] ? row : 0);
      unsigned bad = __ballot_sync(~0u, !sound[half] && there[half]);
      bad |= bad >> 1;
      bad |= bad >> 2;
      if (lane == 0) p.bad_rows[item.number * (kPrefillRows / 8) + row / 8] = bad & 0x11111111u;
    }
    // By way of shared memory, so that this code is there once and not for every column. Neighbours exchange pairs of
    // columns, so that each has four in a row.
    push(next_leaf);
    const bool odd = lane % 2 != 0;
#pragma unroll 1
    for (int j = 0; j < kUnits; j += 2) {
      const float4 a = next_leaf[j * 128], b = next_leaf[(j + 1) * 128];
      const float4 give = odd ? a : b, keep = odd ? b : a;
      const float4 got = make_float4(__shfl_xor_sync(~0u, give.x, 1), __shfl_xor_sync(~0u, give.y, 1),
                                     __shfl_xor_sync(~0u, give.z, 1), __shfl_xor_sync(~0u, give.w, 1));
      const float4 low = odd ? got : keep, high = odd ? keep : got;
      const int column = 8 * (j + (odd ? 1 : 0)) + lane % 4 / 2 * 4;
      const bool has_column = column < p.v.dim;
      if (there[0] && has_column)
        store_result(p, item.item.node, to[0], column, m[0], l[0], make_float4(low.x, low.y, high.x, high.y));
      if (there[1] && has_column)
        store_result(p, item.item.node, to[1], column, m[1], l[1], make_float4(low.z, low.w, high.z, high.w));
    }
  }

 private:
  static constexpr int kUnits = kDim / 8;  // of four floats, of o in a thread

  // Where this thread's part of the state that waits at a level lies.
  __device__ __forceinline__ float4* slot(int level) const {
    static_assert(waiting_floats(kDim) == 2 * 128 * 4 * (kUnits + 1));
    const int index = static_cast<int>(blockIdx.x) * p.waiting_levels + __popc(waiting >> level);
    return reinterpret_cast<float4*>(p.waiting + static_cast<std::int64_t>(index) * waiting_floats(kDim)) +
           group * (kUnits + 1) * 128 + thread;
  }
  __device__ __forceinline__ void push(float4* to) const {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) to[i * 128] = make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
  }
  __device__ __forceinline__ void merge_with(const float4* lower, const float4& sums) {
    float tops[2];
    const MergeWeights first = MergeWeights::of(sums.x, m[0], tops[0]);
    const MergeWeights second = MergeWeights::of(sums.y, m[1], tops[1]);
    m[0] = tops[0];
    m[1] = tops[1];
    l[0] = first.merged(sums.z, l[0]);
    l[1] = second.merged(sums.w, l[1]);
    constexpr int kBatch = kUnits % 8 == 0 ? 8 : kUnits % 4 == 0 ? 4 : 2;  // loads on their way
#pragma unroll
    for (int i = 0; i < kUnits; i += kBatch) {
      float4 low[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) low[j] = lower[(i + j) * 128];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int at_o = 4 * (i + j);
        o[at_o] = first.merged(low[j].x, o[at_o]);
        o[at_o + 1] = first.merged(low[j].y, o[at_o + 1]);
        o[at_o + 2] = second.merged(low[j].z, o[at_o + 2]);
        o[at_o + 3] = second.merged(low[j].w, o[at_o + 3]);
      }
    }
  }

  const AttentionParams& p;
  const int group, thread, lane;
  float4* const next_leaf;  // what waits for the next leaf; its m and l:
  float4 next_leaf_sums;
};

}  // namespace treeattn::kernels::cuda
