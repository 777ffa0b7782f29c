// SPDX-License-Identifier: Apache-2.0
// What LeafMerge does, for more than 8 rows, with half the shared memory, so that two blocks share a multiprocessor:
// warp 1 hands its state to warp 0 and warp 3 to warp 2, then warp 2 to warp 0, who merges the leaf's state with those
// that waited for it. They merge in the registers in which states are made, and who has handed over goes on with the
// next leaf. With fewer rows this is slower: at the end of an item all warps wait for one.
#pragma once

#include "kernels/cuda/decode/leaf_states.cuh"
#include "kernels/cuda/piece_copy.cuh"

namespace treeattn::kernels::cuda {

template <class Warp>
class LeafHandover {
 public:
  static constexpr int kDim = Warp::kDim, kPitch = LeafStates<Warp>::kPitch;

  // Shared memory for items of at most 2^levels leaves with keys.
  static std::size_t floats(int rows, int levels) {
    return static_cast<std::size_t>(rows) * kPitch * (kBuffers + levels) + kLevels + 2 * kBarriers;
  }

  __device__ LeafHandover(float* memory, int rows, int warp, int lane)
      : states_(rows, lane),
        barriers_{shared_address(memory)},
        leaves_(reinterpret_cast<int*>(memory) + 2 * kBarriers),
        memory_(memory + 2 * kBarriers + kLevels),
        rows_(rows),
        warp_(warp),
        lane_(lane) {}

  // By all threads, before the first leaf.
  __device__ void begin() const {
    if (threadIdx.x == 0) barriers_.init(kBarriers, 32);
    __syncthreads();
  }

  // A warp's part of a leaf is done. next: the next leaf with keys, -1 at the last.
  __device__ void add_leaf(Warp& own, int leaf, int next) {
    own.settle();
#pragma unroll 1
    for (int step = 1; step < kMmaWarps && warp_ % (2 * step) == 0; step *= 2) {
      const int giver = warp_ + step;
      barriers_.wait(kGiven + giver, turn_);
      states_.template merge<true>(own, handed_over(giver));
      if (warp_ == 0) barriers_.arrive(kTaken + giver / 2);
    }
    if (warp_ == 0) {
      // What waits is merged as soon as no later leaf belongs between it and this one.
#pragma unroll 1
      for (; depth_ > 0 && !waits(leaves_[depth_ - 1], leaf, next); --depth_) {
        states_.template merge<false>(own, waiting(depth_ - 1));
      }
      if (next < 0) return;
      store(own, waiting(depth_));
      if (lane_ == 0) leaves_[depth_] = leaf;
      __syncwarp();
      ++depth_;
    } else {
      // Warp 2 has itself taken what lay there.
      if (warp_ % 2 == 1) barriers_.wait(kTaken + warp_ / 2, turn_ ^ 1);
      store(own, handed_over(warp_));
      barriers_.arrive(kGiven + warp_);
    }
    turn_ ^= 1;
    own.clear();
  }

  // After the last leaf: the states of the item, v_dim columns of them; false where a number of this thread is not
  // finite.
  __device__ bool store_root(const Warp& own, float* to, int v_dim) const {
    if (warp_ == 0) store(own, memory_);
    __syncthreads();
    bool finite = true;
    for_root(v_dim, [&](int row, int column, const StatePart& part) {
      finite = part.store(to + row * row_state_floats(v_dim), v_dim, column) && finite;
    });
    return finite;
  }

  // The same, where there is nothing to merge it with.
  __device__ void store_result(const AttentionParams& p, const WorkItem& item) const {
    for_root(p.v.dim, [&](int row, int column, const StatePart& part) {
      cuda::store_result(p, item.node, global_row(p, item, row), column, part.m, part.l, part.o);
    });
  }

 private:
  static constexpr int kLevels = LeafStates<Warp>::kMostLevels;
  static constexpr int kBuffers = 2;  // for what warp 1 hands over, and for what warps 3 and then 2 do
  enum Barrier : int { kTaken = 0, kGiven = 1, kBarriers = 6 };  // kTaken + buffer; kGiven + warp, from 1 on

  __device__ float* handed_over(int giver) const { return memory_ + giver / 2 * states_.floats(); }
  __device__ float* waiting(int depth) const { return memory_ + (kBuffers + depth) * states_.floats(); }

  // Where lanes may just have read what another lane now writes.
  __device__ void store(const Warp& own, float* state) const {
    __syncwarp();
    states_.store(own, state);
  }

  template <class Body>
  __device__ void for_root(int v_dim, const Body& body) const {
    StateUnits<Warp>::for_each(rows_, v_dim, [&](int, int row, int column) {
      body(row, column, StatePart::load(memory_ + row * kPitch, kDim, column));
    });
  }

  const LeafStates<Warp> states_;
  const StageBarriers barriers_;
  int* const leaves_;    // [kLevels] of what waits
  float* const memory_;  // [kBuffers + levels, rows, kPitch]: handed over, then what waits; at last, the root
  const int rows_, warp_, lane_;
  int depth_ = 0;
  unsigned turn_ = 0;  // leaves so far, modulo 2
};

}  // namespace treeattn::kernels::cuda
