// SPDX-License-Identifier: Apache-2.0
// Prefill on Hopper's tensor cores. A block takes items, 128 queries of one head over one node of the tree, until none
// is left. One warp brings K and V, 128 keys at a time, leaf by leaf; two warpgroups work on 64 rows each. The logits
// of a tile are multiplied while the last tile's weights meet their values. Where K and V are bytes, the other warps of
// the first warpgroup widen them.
//
// A leaf has a state of its own, which lies in registers. At its end it is merged with the states that waited for it,
// or waits itself: every thread keeps its own part of what waits, so nobody has to wait for a barrier. What waits for
// the very next leaf lies in shared memory, the rest in the workspace.
#pragma once

#include "kernels/cuda/launch.h"
#include "kernels/cuda/prefill/prefill_group.cuh"
#include "kernels/cuda/prefill/prefill_supply.cuh"
#include "kernels/cuda/prefill/prefill_widening.cuh"

namespace treeattn::kernels::cuda {

inline constexpr int kPrefillThreads = 3 * 128;

template <class Elements, int kDim>
__global__ void __launch_bounds__(kPrefillThreads, 1) prefill_kernel(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(1024) std::byte memory[];  // tensor copies exchange units by address
  const PrefillRing<Elements, kDim> ring(memory);
  if (threadIdx.x == 0) ring.init();
  __syncthreads();
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  if (group == 0) {
    give_registers<Elements::kFewRegisters>();
    if (threadIdx.x == 0) PrefillSupply<Elements, kDim>(p, ring).run();
    if constexpr (Elements::kWidened) {
      if (threadIdx.x >= 32) PrefillWidening<Elements, kDim>(p, ring).run();
    }
  } else {
    take_registers<Elements::kManyRegisters>();
    PrefillGroup<Elements, kDim>(p, ring, memory, group - 1).run();
  }
}

// The kernel for K and V of a kind and at most `dim` columns; null where there is none. Each kind is compiled in a file
// of its own.
template <class Elements>
Launch prefill_launch(int dim) {
  const auto launch = [](void (*kernel)(AttentionParams), int bytes) {
    Launch out{kernel, kPrefillThreads, static_cast<std::size_t>(bytes), "prefill", {}, kPrefillBox};
    out.takes_items = true;
    out.whole_lines = true;
    return out;
  };
  switch (kernel_columns(dim)) {
    case 64:
      return launch(prefill_kernel<Elements, 64>, PrefillLayout<Elements, 64>::kBytes);
    case 80:
      return launch(prefill_kernel<Elements, 80>, PrefillLayout<Elements, 80>::kBytes);
    case 96:
      return launch(prefill_kernel<Elements, 96>, PrefillLayout<Elements, 96>::kBytes);
    case 128:
      return launch(prefill_kernel<Elements, 128>, PrefillLayout<Elements, 128>::kBytes);
    default:
      return {};
  }
}

}  // namespace treeattn::kernels::cuda
