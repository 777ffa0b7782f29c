// SPDX-License-Identifier: Apache-2.0
// A pair of a head turned by an angle, the same wherever it is done.
#pragma once

namespace treeattn::kernels::cuda {

struct TurnedPair {
  float first, second;
};

__device__ inline TurnedPair turned(float first, float second, float cosine, float sine) {
  return {__fmaf_rn(first, cosine, -(second * sine)), __fmaf_rn(second, cosine, first * sine)};
}

}  // namespace treeattn::kernels::cuda
