// SPDX-License-Identifier: Apache-2.0
// One packed row in the hands of one warp.
#pragma once

#include "merge/operator.h"

namespace treeattn::kernels::cuda {

inline constexpr int kLanes = 32;

// Row `lower` becomes merge(lower, higher): merge::merge_row, lane by lane. Called by all lanes.
__device__ inline void warp_merge_row(float* lower, const float* higher, int row_floats) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const float m_lower = lower[0], m_higher = higher[0];
  __syncwarp();  // all have read the maximum before one of them changes it
  if (m_higher == merge::kEmptyMax) return;
  if (m_lower == merge::kEmptyMax) {
    for (int i = lane; i < row_floats; i += kLanes) lower[i] = higher[i];
  } else {
    const float m = merge::ScalarOps::max(m_lower, m_higher);
    const float w_lower = merge::state_weight(m_lower, m), w_higher = merge::state_weight(m_higher, m);
    for (int i = lane; i < row_floats; i += kLanes) {
      lower[i] = i == 0 ? m : merge::merge_component<merge::ScalarOps>(lower[i], w_lower, higher[i], w_higher);
    }
  }
  __syncwarp();
}

}  // namespace treeattn::kernels::cuda
