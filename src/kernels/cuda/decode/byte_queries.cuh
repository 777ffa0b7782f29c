// SPDX-License-Identifier: Apache-2.0
// q as the other factor of 8-bit keys. A thread has, of every row lane / 4 (and that plus 8), four columns for each of
// kSteps words of a key; which ones, its caller knows. `unit` is what a product is in units of. Products are sums of
// type Sum first, kParts tiles of them for every eight keys, which `finish` turns into floats.
#pragma once

#include "kernels/cuda/byte_elements.cuh"
#include "kernels/cuda/decode/row_factor.cuh"
#include "kernels/cuda/mma.cuh"

namespace treeattn::kernels::cuda {

__device__ inline float largest_of(const float4& four) {
  return fmaxf(fmaxf(fabsf(four.x), fabsf(four.y)), fmaxf(fabsf(four.z), fabsf(four.w)));
}

// float16: for up to 8 rows two limbs, the lower one as rows 8 to 15 of the product; for up to 16 rows one.
template <class Bytes, int kSteps, int kHalves>
struct HalfQuery {
  using Sum = float;
  static constexpr int kParts = 1;
  std::uint32_t q[kSteps][4];
  float unit[kHalves];

  // columns(step): the elements of this thread, zero where there is no such row. Called twice for each: there are not
  // registers enough to keep what is not yet cut into limbs.
  template <class Columns>
  __device__ void load(int half, const Columns& columns) {
    float most = 0.0f;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) most = fmaxf(most, largest_of(columns(step)));
    const auto [factor, row_unit] = row_scaling(most, 14);
    unit[half] = row_unit;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const float4 loaded = columns(step);
      const float four[4] = {loaded.x * factor, loaded.y * factor, loaded.z * factor, loaded.w * factor};
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        float a = four[Bytes::byte_of(pair, 0)], b = four[Bytes::byte_of(pair, 1)];
        q[step][2 * pair + half] = take_limbs<__half>(a, b);
        if (kHalves == 1) q[step][2 * pair + 1] = pack<__half>(a, b);
      }
    }
  }

  // sums = q . k for every eight keys.
  template <int kEights>
  __device__ void multiply(Sum (&sums)[kEights][kParts][4], const std::uint32_t (&keys)[kEights][kSteps]) const {
#pragma unroll
    for (int t = 0; t < kEights; ++t) sums[t][0][0] = sums[t][0][1] = sums[t][0][2] = sums[t][0][3] = 0.0f;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int t = 0; t < kEights; ++t) {
        std::uint32_t b[2];
        Bytes::widen(keys[t][step], b[0], b[1]);
        multiply_add<__half>(sums[t][0], q[step], b[0], b[1]);
      }
    }
  }
  // Of 8 rows, s[0] and s[1] alone.
  __device__ static void finish(float (&s)[4], const Sum (&sums)[kParts][4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) s[j] = kHalves == 1 && j < 2 ? sums[0][j] + sums[0][j + 2] : sums[0][j];
  }
};

// Fixed point in three bytes, for int8 and up to 8 rows: keys need not be converted. The middle bytes are rows 8 to 15
// of the first product, the lowest those of a second.
template <int kSteps>
struct FixedQuery {
  using Sum = int;
  static constexpr int kParts = 2;
  static constexpr int kDoubles = (kSteps + 1) / 2;  // a product takes two words of a key
  std::uint32_t q[kDoubles][2][3];                   // word, byte: the highest first
  float unit[1];

  template <class Columns>
  __device__ void load(int /*half*/, const Columns& columns) {
    float most = 0.0f, poison = 0.0f;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const float4 four = columns(step);
      most = fmaxf(most, largest_of(four));
      poison += (four.x + four.y + four.z + four.w) * 0.0f;  // an integer cannot be NaN
    }
    poison += __shfl_xor_sync(~0u, poison, 1);
    poison += __shfl_xor_sync(~0u, poison, 2);
    const auto [factor, row_unit] = row_scaling(most, 21);
    unit[0] = row_unit + poison;
#pragma unroll
    for (int step = 0; step < 2 * kDoubles; ++step) {
      std::uint32_t(&bytes)[3] = q[step / 2][step % 2];
      bytes[0] = bytes[1] = bytes[2] = 0;
      if (step >= kSteps) continue;
      // Signed bytes: with 128 added to each of the lower two there is no borrowing between them.
      const float4 four = columns(step);
      const std::uint32_t x = fixed_point(four.x * factor), y = fixed_point(four.y * factor);
      const std::uint32_t z = fixed_point(four.z * factor), w = fixed_point(four.w * factor);
      const std::uint32_t lower_xy = __byte_perm(x, y, 0x5140), lower_zw = __byte_perm(z, w, 0x5140);
      bytes[0] = __byte_perm(__byte_perm(x, y, 0x0062), __byte_perm(z, w, 0x0062), 0x5410);
      bytes[1] = __byte_perm(lower_xy, lower_zw, 0x7632) ^ 0x80808080u;
      bytes[2] = __byte_perm(lower_xy, lower_zw, 0x5410) ^ 0x80808080u;
    }
  }

  template <int kEights>
  __device__ void multiply(Sum (&sums)[kEights][kParts][4], const std::uint32_t (&keys)[kEights][kSteps]) const {
#pragma unroll
    for (int t = 0; t < kEights; ++t) {
#pragma unroll
      for (int i = 0; i < 4 * kParts; ++i) sums[t][i / 4][i % 4] = 0;
    }
#pragma unroll
    for (int i = 0; i < kDoubles; ++i) {
      const std::uint32_t a[4] = {q[i][0][0], q[i][0][1], q[i][1][0], q[i][1][1]};
      const std::uint32_t b[4] = {q[i][0][2], 0, q[i][1][2], 0};
#pragma unroll
      for (int t = 0; t < kEights; ++t) {
        const std::uint32_t word = keys[t][2 * i], next = 2 * i + 1 < kSteps ? keys[t][(2 * i + 1) % kSteps] : 0;
        multiply_add_bytes(sums[t][0], a, word, next);
        multiply_add_bytes(sums[t][1], b, word, next);
      }
    }
  }
  __device__ static void finish(float (&s)[4], const Sum (&sums)[kParts][4]) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float rest = static_cast<float>(sums[0][2 + j] * 256 + sums[1][j]);
      s[j] = __fmaf_rn(static_cast<float>(sums[0][j]), 65536.0f, rest);
    }
  }

 private:
  __device__ static std::uint32_t fixed_point(float x) {
    return static_cast<std::uint32_t>(__float2int_rn(x)) + 0x8080u;
  }
};

}  // namespace treeattn::kernels::cuda
