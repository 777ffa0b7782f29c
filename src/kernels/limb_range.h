// SPDX-License-Identifier: Apache-2.0
// Which elements of q may be cut into limbs where numbers below 2^-126 are taken for zero (docs/exactness.md). The last
// limb of a smaller one could be lost; a larger one would make something of what keys lose.
#pragma once

namespace treeattn::kernels {

inline constexpr float kLeastWithLimbs = 0x1p-102f;
inline constexpr float kMostWithLimbs = 0x1p76f;  // times the softmax's scale

}  // namespace treeattn::kernels
