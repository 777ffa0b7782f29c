// SPDX-License-Identifier: Apache-2.0
// The elements of a head that attention takes, of K and of V.
#pragma once

#include <cstdint>

namespace treeattn::kernels {

inline constexpr std::int64_t kLeastHeadDim = 16, kMostHeadDim = 256, kHeadDimStep = 8;

constexpr bool takes_head_dim(std::int64_t head_dim) {
  return head_dim >= kLeastHeadDim && head_dim <= kMostHeadDim && head_dim % kHeadDimStep == 0;
}

}  // namespace treeattn::kernels
