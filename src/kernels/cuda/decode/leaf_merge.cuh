// SPDX-License-Identifier: Apache-2.0
// The end of a leaf in a block of four warps: their states are merged, lower with higher, and the leaf's state is
// merged on with those that waited for it. Every thread takes four columns of a row, the same ones each time, so what
// waits needs no barrier but the two that hand over the warps' states.
#pragma once

#include "kernels/cuda/decode/leaf_states.cuh"

namespace treeattn::kernels::cuda {

template <class Warp>
class LeafMerge {
 public:
  static constexpr int kDim = Warp::kDim, kPitch = LeafStates<Warp>::kPitch;

  // Shared memory for items of at most 2^levels leaves with keys.
  static std::size_t floats(int rows, int levels) {
    return static_cast<std::size_t>(rows) * kPitch * (kMmaWarps + levels) + kLevels;
  }

  __device__ LeafMerge(float* memory, int rows, int warp, int lane)
      : states_(rows, lane),
        leaves_(reinterpret_cast<int*>(memory)),
        warps_(memory + kLevels),
        waiting_(warps_ + kMmaWarps * states_.floats()),
        rows_(rows),
        block_(states_.floats()),
        warp_(warp) {
#pragma unroll
    for (int i = 0; i < Units::kMost; ++i) root_[i] = {merge::kEmptyMax, 0.0f, make_float4(0, 0, 0, 0)};
  }

  __device__ void begin() const {}

  // Called by all threads at the end of a leaf. next: the next leaf with keys, -1 at the last.
  __device__ void add_leaf(Warp& own, int leaf, int next) {
    own.settle();
    states_.store(own, warps_ + warp_ * block_);
    own.clear();
    __syncthreads();
    int depth = depth_;
    Units::for_each(rows_, kDim, [&](int i, int row, int column) {
      const auto of_warp = [&](int warp) { return load(warps_ + warp * block_, row, column); };
      StatePart part = merged(merged(of_warp(0), of_warp(1)), merged(of_warp(2), of_warp(3)));
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
    Units::for_each(rows_, kDim, [&](int i, int row, int column) {
      root_[i].store(waiting_ + depth * block_ + row * kPitch, kDim, column);
    });
    if (threadIdx.x == 0) leaves_[depth] = leaf;
    ++depth_;
  }

  // After the last leaf: the states of the item, v_dim columns of them; false where a number of this thread is not
  // finite.
  __device__ bool store_root(const Warp& /*own*/, float* to, int v_dim) const {
    bool finite = true;
    Units::for_each(rows_, v_dim, [&](int i, int row, int column) {
      finite = root_[i].store(to + row * row_state_floats(v_dim), v_dim, column) && finite;
    });
    return finite;
  }

  // The same, where there is nothing to merge it with.
  __device__ void store_result(const AttentionParams& p, const WorkItem& item) const {
    Units::for_each(rows_, p.v.dim, [&](int i, int row, int column) {
      const StatePart& part = root_[i];
      cuda::store_result(p, item.node, global_row(p, item, row), column, part.m, part.l, part.o);
    });
  }

 private:
  using Units = StateUnits<Warp>;
  static constexpr int kLevels = LeafStates<Warp>::kMostLevels;

  __device__ static StatePart load(const float* state, int row, int column) {
    return StatePart::load(state + row * kPitch, kDim, column);
  }
  __device__ static StatePart merged(const StatePart& lower, const StatePart& higher) {
    StatePart out;
    const MergeWeights w = MergeWeights::of(lower.m, higher.m, out.m);
    out.l = w.merged(lower.l, higher.l);
    out.o = w.merged(lower.o, higher.o);
    return out;
  }

  const LeafStates<Warp> states_;
  int* const leaves_;     // [kLevels] of what waits
  float* const warps_;    // [warps, rows, kPitch]
  float* const waiting_;  // [levels, rows, kPitch]
  const int rows_, block_, warp_;
  int depth_ = 0;
  StatePart root_[Units::kMost];
};

}  // namespace treeattn::kernels::cuda
