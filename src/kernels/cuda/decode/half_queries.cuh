// SPDX-License-Identifier: Apache-2.0
// q as the other factor of 16-bit keys, T being their type. A thread has, of row lane / 4 (and that plus 8), columns
// lane % 4 * 2 and one more of every eight, or of the last of the row's `eights` where it has no more: keys have zeros
// there. A product is in units of `unit`, once it is finished.
#pragma once

#include <type_traits>

#include "kernels/cuda/decode/row_factor.cuh"
#include "kernels/cuda/mma.cuh"
#include "treeattn/dtype.h"

namespace treeattn::kernels::cuda {

// q of type T.
template <class T, int kSteps, int kHalves>
struct SameQuery {
  static constexpr bool kAsItIs = true;  // loading it waits for nothing
  static constexpr float unit = 1.0f;

  __device__ void load(int half, const std::byte* row, int eights, DType /*type*/, int lane) {
    const auto* from = reinterpret_cast<const std::uint32_t*>(row);
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) {
      q[i / 2][i % 2 * kHalves + half] = from[min(i, eights - 1) * 4 + lane % 4];
    }
  }
  // s += q k of 16 columns for eight keys.
  __device__ void multiply(float (&s)[4], int step, std::uint32_t b0, std::uint32_t b1) const {
    const std::uint32_t a[4] = {q[step][0], kHalves == 2 ? q[step][1] : 0, q[step][kHalves],
                                kHalves == 2 ? q[step][3] : 0};
    multiply_add<T>(s, a, b0, b1);
  }
  __device__ static void finish(float (&)[2][4]) {}

 private:
  std::uint32_t q[kSteps][2 * kHalves];
};

// q of another type, up to 8 rows, in three limbs of T, which hold a float32 as it is: the upper one in the rows of the
// product, the others, whose products are small, in rows 8 to 15. float16 has not the range: so a row is scaled first.
template <class T, int kSteps>
struct LimbQuery {
  static constexpr bool kAsItIs = false;
  float unit;

  __device__ void load(int /*half*/, const std::byte* row, int eights, DType type, int lane) {
    const auto two_elements = [&](int i) {
      const int pair = min(i, eights - 1) * 4 + lane % 4;
      if (type == DType::kFloat32) return reinterpret_cast<const float2*>(row)[pair];
      const std::uint32_t both = reinterpret_cast<const std::uint32_t*>(row)[pair];
      return type == DType::kBFloat16 ? unpack<__nv_bfloat16>(both) : unpack<__half>(both);
    };
    float most = 0.0f;
    bool loses = false;
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) {
      const float2 pair = two_elements(i);
      most = fmaxf(most, fmaxf(fabsf(pair.x), fabsf(pair.y)));
      loses |= loses_limbs(pair.x) || loses_limbs(pair.y);
    }
    RowScaling scaling;
    if constexpr (std::is_same_v<T, __half>) {
      scaling = row_scaling(most, 14);
    } else if (__any_sync(~0u, loses)) {
      scaling.unit = no_unit();
    }
    unit = scaling.unit;
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) {
      float2 pair = two_elements(i);
      pair = make_float2(pair.x * scaling.factor, pair.y * scaling.factor);
#pragma unroll
      for (int limb = 0; limb < 3; ++limb) q[i / 2][i % 2][limb] = take_limbs<T>(pair.x, pair.y);
    }
  }
  __device__ void multiply(float (&s)[4], int step, std::uint32_t b0, std::uint32_t b1) const {
    const std::uint32_t upper[4] = {q[step][0][0], q[step][0][1], q[step][1][0], q[step][1][1]};
    const std::uint32_t lowest[4] = {0, q[step][0][2], 0, q[step][1][2]};
    multiply_add<T>(s, upper, b0, b1);
    multiply_add<T>(s, lowest, b0, b1);
  }
  __device__ static void finish(float (&s)[2][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i / 2][i % 2] += s[i / 2][2 + i % 2];
  }

 private:
  std::uint32_t q[kSteps][2][3];
};

}  // namespace treeattn::kernels::cuda
