// SPDX-License-Identifier: Apache-2.0
// The tile registers of AMX in software, for tests: on processors without them, and where the address sanitizer is to
// see what a tile reads and writes (TREEATTN_SOFTWARE_TILES). Sums have the bits that a Xeon's have
// (docs/exactness.md), but for the sign of what is taken for zero.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/x86/tile_shapes.h"

namespace treeattn::kernels::amx {

class Tiles {
 public:
  explicit Tiles(const TileShapes& shapes) : shapes_(shapes) {}
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  template <int T>
  void zero() {
    __builtin_memset(data_[T], 0, sizeof(data_[T]));
  }
  template <int T>
  void load(const void* from, std::int64_t stride) {
    zero<T>();
    for (int r = 0; r < shapes_.rows[T]; ++r) {
      __builtin_memcpy(data_[T][r], static_cast<const std::byte*>(from) + r * stride, shapes_.row_bytes[T]);
    }
  }
  template <int T>
  void store(void* to, std::int64_t stride) {
    for (int r = 0; r < shapes_.rows[T]; ++r) {
      __builtin_memcpy(static_cast<std::byte*>(to) + r * stride, data_[T][r], shapes_.row_bytes[T]);
    }
  }
  template <int Sum, int A, int B>
  void add_bfloat16_products() {
    for (int r = 0; r < shapes_.rows[Sum]; ++r) {
      __m512 even = _mm512_setzero_ps(), odd = even;
      for (int i = 0; i < shapes_.row_bytes[A] / 4; ++i) {
        const __m512i a = broadcast<A>(r, i), b = row<B>(i);
        even = flushed(_mm512_fmadd_ps(even_of(a), even_of(b), even));
        odd = flushed(_mm512_fmadd_ps(odd_of(a), odd_of(b), odd));
      }
      const __m512 before = _mm512_castsi512_ps(row<Sum>(r));
      put<Sum>(r, _mm512_castps_si512(flushed(_mm512_add_ps(before, flushed(_mm512_add_ps(even, odd))))));
    }
  }
  template <int Sum, int A, int B>
  void add_int8_products() {
    const auto byte_of = [](__m512i x, unsigned i) { return _mm512_srai_epi32(_mm512_slli_epi32(x, 24 - 8 * i), 24); };
    for (int r = 0; r < shapes_.rows[Sum]; ++r) {
      __m512i sum = row<Sum>(r);
      for (int i = 0; i < shapes_.row_bytes[A] / 4; ++i) {
        const __m512i a = broadcast<A>(r, i), b = row<B>(i);
        for (unsigned j = 0; j < 4; ++j) {
          sum = _mm512_add_epi32(sum, _mm512_mullo_epi32(byte_of(a, j), byte_of(b, j)));
        }
      }
      put<Sum>(r, sum);
    }
  }

 private:
  template <int T>
  __m512i row(int r) const {
    return _mm512_load_si512(data_[T][r]);
  }
  // A pair, or four numbers, of a row.
  template <int T>
  __m512i broadcast(int r, int i) const {
    int x = 0;
    __builtin_memcpy(&x, data_[T][r] + 4 * i, sizeof(x));
    return _mm512_set1_epi32(x);
  }
  // Where the register has columns.
  template <int T>
  void put(int r, __m512i x) {
    _mm512_mask_storeu_epi32(data_[T][r], static_cast<__mmask16>((1u << shapes_.row_bytes[T] / 4) - 1), x);
  }
  static __m512 flushed(__m512 x) {
    return _mm512_maskz_mov_ps(_mm512_test_epi32_mask(_mm512_castps_si512(x), _mm512_set1_epi32(0x7f800000)), x);
  }
  static __m512 even_of(__m512i pairs) { return flushed(_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))); }
  static __m512 odd_of(__m512i pairs) {
    return flushed(_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u)))));
  }

  const TileShapes shapes_;
  alignas(64) std::byte data_[8][kRows][kRowBytes] = {};
};

// As VCVTNE2PS2BF16, for processors without it.
static inline __m256i to_bfloat16(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(_mm512_set1_epi32(0x7fff), even));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x00400000));
  const __mmask16 subnormal = _mm512_testn_epi32_mask(bits, _mm512_set1_epi32(0x7f800000));
  rounded = _mm512_mask_and_epi32(rounded, subnormal, bits, _mm512_set1_epi32(static_cast<int>(0x80000000u)));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

}  // namespace treeattn::kernels::amx
