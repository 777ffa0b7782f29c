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

// Null where another rank carries the token.
__device__ inline std::byte* step_row(const StepTarget& t, int part, int row, int head) {
  if (part == kStepQuery) {
    const std::int64_t at = (std::int64_t{row} * t.heads + head) * t.k.dim;  // many rows come to more than 2^31 bytes
    return static_cast<std::byte*>(t.turned_q) + at * element_size(t.k.dtype);
  }
  const DeviceKv& kv = part == kStepValue ? t.v : t.k;
  const std::int64_t token = t.lengths[row] - 1;
  // Selected, not branched on: who asks early need not wait for the table yet.
  const std::byte* const here = kv_row(kv, row, token, head);
  return const_cast<std::byte*>(kv.page_tokens > 0 && page_of(kv, row, token) < 0 ? nullptr : here);
}

// The cosine and sine of columns i and i + dim / 2; those of a value turn nothing.
__device__ inline TurnedPair step_angle(const StepTarget& t, int part, int row, int i) {
  if (part == kStepValue) return {1.0f, 0.0f};
  const float* cosine = t.angles + std::int64_t{row} * t.k.dim;
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
  if (row == nullptr) return;
  if (part != kStepValue) pair = turned(pair.first, pair.second, angle.first, angle.second);
  store_rounded(row, i, t.k.dtype, pair.first);
  store_rounded(row, i + t.k.dim / 2, t.k.dtype, pair.second);
}

}  // namespace treeattn::kernels::cuda
