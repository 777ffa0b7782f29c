// SPDX-License-Identifier: Apache-2.0
// The activation between the maps of a feed-forward part.
#pragma once

namespace treeattn::kernels::cuda {

// Far below zero next to nothing is left of a gate, and -2^-126 stands for it, as on a CPU: not 0, as 0 * inf would be
// NaN. Of an infinite gate it is NaN, as -inf / inf is.
__device__ inline float swiglu(float gate, float up) {
  const float silu = gate < -87.5f ? (gate - gate) - 0x1p-126f : gate / (1.0f + expf(-gate));
  return silu * up;
}

}  // namespace treeattn::kernels::cuda
