// SPDX-License-Identifier: Apache-2.0
// The end of a leaf in a block of four warps: their states are merged, lower with higher, and the leaf's state is
// merged on with those that waited for it. Every thread takes four columns of a row, the same ones each time, so what
// waits needs no barrier but the two that hand over the warps' states.
#pragma once

#include "kernels/cuda/merge_tail.cuh"
#include "kernels/cuda/piece_cursor.cuh"

namespace treeattn::kernels::cuda {

template <int kDim, int kRows>
class LeafMerge {
 public:
  static constexpr int kPitch = row_state_floats(kDim);  // columns of different rows lie in different banks

  // Shared memory for items of at most 2^levels leaves with keys.
  static std::size_t floats(int rows, int levels) {
    return static_cast<std::size_t>(rows) * kPitch * (kMmaWarps + levels) + kLevels;
  }

  __device__ LeafMerge(float* memory, int rows)
      : leaves_(reinterpret_cast<int*>(memory)),
        warps_(memory + kLevels),
        waiting_(warps_ + kMmaWarps * rows * kPitch),
        rows_(rows),
        block_(rows * kPitch) {
#pragma unroll
    for (int i = 0; i < kMost; ++i) root_[i] = {merge::kEmptyMax, 0.0f, make_float4(0, 0, 0, 0)};
  }

  // Where a warp puts its state before add_leaf.
  __device__ float* state_of(int warp) const { return warps_ + warp * block_; }
  // m and l of a row of such a state, by the four lanes that have its keys: l is the sum of theirs, in units of `unit`.
  __device__ __forceinline__ static void store_sums(float* state, int lane, int half, int rows, float m, float l,
                                                    float unit) {
    l += __shfl_xor_sync(~0u, l, 1);
    l += __shfl_xor_sync(~0u, l, 2);
    const int row = lane / 4 + 8 * half;
    if (lane % 4 == 0 && row < rows) {
      float* to = state + row * kPitch + kDim;
      to[0] = m;
      to[1] = l * unit;
    }
  }

  // Called by all threads at the end of a leaf. next: the next leaf with keys, -1 at the last.
  __device__ void add_leaf(int leaf, int next) {
    __syncthreads();
    int depth = depth_;
    for_units([&](int i, int row, int column) {
      Part part = merged(merged(load(warps_, row, column), load(warps_ + block_, row, column)),
                         merged(load(warps_ + 2 * block_, row, column), load(warps_ + 3 * block_, row, column)));
      // What waits is merged as soon as no later leaf belongs between it and this one.
#pragma unroll 1
      for (depth = depth_; depth > 0; --depth) {
        if (waits(leaves_[depth - 1], leaf, next)) break;
        part = merged(load(waiting_ + (depth - 1) * block_, row, column), part);
      }
      root_[i] = part;
    });
    depth_ = depth;
    if (next < 0) return;
    __syncthreads();
    for_units([&](int i, int row, int column) {
      float* to = waiting_ + depth * block_ + row * kPitch;
      *reinterpret_cast<float4*>(to + column) = root_[i].o;
      if (column == 0) {
        to[kDim] = root_[i].m;
        to[kDim + 1] = root_[i].l;
      }
    });
    if (threadIdx.x == 0) leaves_[depth] = leaf;
    ++depth_;
  }

  // After the last leaf: the states of the item; false where a number of this thread is not finite.
  __device__ bool store_root(float* to) const {
    bool finite = true;
    for_units([&](int i, int row, int column) {
      const Part& part = root_[i];
      float* at = to + row * kPitch;
      *reinterpret_cast<float4*>(at + column) = part.o;
      if (column == 0) *reinterpret_cast<float2*>(at + kDim) = make_float2(part.m, part.l);
      finite = finite && isfinite(part.l) && isfinite(part.o.x) && isfinite(part.o.y) && isfinite(part.o.z) &&
               isfinite(part.o.w);
    });
    return finite;
  }

  // The same, where there is nothing to merge it with.
  __device__ void store_result(const AttentionParams& p, const WorkItem& item) const {
    for_units([&](int i, int row, int column) {
      const Part& part = root_[i];
      cuda::store_result(p, item.node, global_row(p, item, row), column, part.m, part.l, part.o);
    });
  }

 private:
  struct Part {
    float m, l;
    float4 o;
  };
  static constexpr int kLevels = 8;                           // most, so that what follows is aligned
  static constexpr int kUnits = kDim / 4;                     // of a row
  static constexpr int kMost = (kRows * kUnits + 127) / 128;  // of a thread

  template <class Body>
  __device__ void for_units(const Body& body) const {
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const int unit = i * 128 + static_cast<int>(threadIdx.x);
      if (unit < rows_ * kUnits) body(i, unit / kUnits, unit % kUnits * 4);
    }
  }
  __device__ static Part load(const float* state, int row, int column) {
    const float* from = state + row * kPitch;
    return {from[kDim], from[kDim + 1], *reinterpret_cast<const float4*>(from + column)};
  }
  __device__ static Part merged(const Part& lower, const Part& higher) {
    Part out;
    const MergeWeights w = MergeWeights::of(lower.m, higher.m, out.m);
    out.l = w.merged(lower.l, higher.l);
    out.o = w.merged(lower.o, higher.o);
    return out;
  }
  int* const leaves_;     // [kLevels] of what waits
  float* const warps_;    // [warps, rows, kPitch]
  float* const waiting_;  // [levels, rows, kPitch]
  const int rows_, block_;
  int depth_ = 0;
  Part root_[kMost];
};

}  // namespace treeattn::kernels::cuda
