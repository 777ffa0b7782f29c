// SPDX-License-Identifier: Apache-2.0
// Heads of a new token, turned, rounded and put where attention finds them: the same wherever it is done.
#pragma once

#include "base/half.h"
#include "kernels/cuda/device_rows.cuh"
#include "kernels/cuda/model/rope.cuh"
#include "kernels/cuda/step_target.h"

namespace treeattn::kernels::cuda {

// q, k or v of a row, by the order in which they are projected.
enum StepPart : int { kStepQuery, kStepKey, kStepValue };

__device__ inline std::byte* step_row(const StepTarget& t, int part, int row, int head) {
  if (part == kStepQuery) {
    return static_cast<std::byte*>(t.turned_q) + (row * t.heads + head) * t.k.dim * element_size(t.k.dtype);
  }
  return const_cast<std::byte*>(kv_row(part == kStepValue ? t.v : t.k, row, t.lengths[row] - 1, head));
}

// The cosine and sine of columns i and i + dim / 2; those of a value turn nothing.
__device__ inline TurnedPair step_angle(const StepTarget& t, int part, int row, int i) {
  if (part == kStepValue) return {1.0f, 0.0f};
  const float* cosine = t.angles + row * t.k.dim;
  return {cosine[i], cosine[i + t.k.dim / 2]};
}

// The same rounding as in row_kernels.cu.
__device__ inline void store_rounded(std::byte* row, int i, DType type, float value) {
  if (type == DType::kFloat32) {
    reinterpret_cast<float*>(row)[i] = value;
  } else if (type == DType::kFloat16) {
    reinterpret_cast<std::uint16_t*>(row)[i] = base::float_to_float16(value);
  } else {
    reinterpret_cast<std::uint16_t*>(row)[i] = base::float_to_bfloat16(value);
  }
}

__device__ inline void store_pair(const StepTarget& t, int part, std::byte* row, int i, TurnedPair pair,
                                  TurnedPair angle) {
  if (part != kStepValue) pair = turned(pair.first, pair.second, angle.first, angle.second);
  store_rounded(row, i, t.k.dtype, pair.first);
  store_rounded(row, i + t.k.dim / 2, t.k.dtype, pair.second);
}

}  // namespace treeattn::kernels::cuda
