// SPDX-License-Identifier: Apache-2.0
// Per target: loads of every K/V type as float32 vectors, the arithmetic for the merge formula.
#if defined(TREEATTN_SIMD_COMMON_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TREEATTN_SIMD_COMMON_INL_H_
#undef TREEATTN_SIMD_COMMON_INL_H_
#else
#define TREEATTN_SIMD_COMMON_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "hwy/highway.h"
#include "kernels/cpu/rows_ahead.h"
#include "kernels/cpu/tile_ops.h"
#include "merge/exp2_polynomial.h"

HWY_BEFORE_NAMESPACE();
namespace treeattn::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Vectors of unknown length cannot be halved by type; they are summed lane by lane instead.
#if HWY_TARGET == HWY_SVE || HWY_TARGET == HWY_SVE2 || HWY_TARGET == HWY_SVE_256 || HWY_TARGET == HWY_SVE2_128
#undef TREEATTN_SCALABLE
#define TREEATTN_SCALABLE 1
#else
#undef TREEATTN_SCALABLE
#define TREEATTN_SCALABLE 0
#endif

// Accumulators that fit the register file beside the operands: 16 registers on x86 up to AVX2, 32 elsewhere.
#if HWY_ARCH_X86 && HWY_TARGET > HWY_AVX3
inline constexpr int kRegisterRows = 2;
#else
inline constexpr int kRegisterRows = 4;
#endif

struct Fp8 {
  std::uint8_t bits;
};

template <class DF>
HWY_INLINE hn::Vec<DF> load_f32(DF df, const float* p) {
  return hn::LoadU(df, p);
}

template <class DF>
HWY_INLINE hn::Vec<DF> load_f32(DF df, const hwy::bfloat16_t* p) {
  const hn::Rebind<std::uint16_t, DF> d16;
  const hn::Rebind<std::uint32_t, DF> d32;
  return hn::BitCast(df,
                     hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(p)))));
}

template <class DF>
HWY_INLINE hn::Vec<DF> load_f32(DF df, const hwy::float16_t* p) {
#if HWY_TARGET >= HWY_EMU128 || (HWY_ARCH_X86 && HWY_TARGET >= HWY_SSE4)
  // Without an instruction for it, Highway's conversion takes inf and NaN for numbers. The exponent moves by a product,
  // which also makes subnormals right.
  const hn::Rebind<std::uint16_t, DF> d16;
  const hn::Rebind<std::uint32_t, DF> d32;
  const auto bits = hn::PromoteTo(d32, hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(p)));
  const auto magnitude = hn::And(bits, hn::Set(d32, 0x7FFFu));
  const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(d32, 0x8000u)));
  const auto shifted = hn::ShiftLeft<13>(magnitude);
  const auto number = hn::BitCast(d32, hn::Mul(hn::BitCast(df, shifted), hn::Set(df, 0x1p112f)));
  const auto special = hn::Or(shifted, hn::Set(d32, 0x7F800000u));
  const auto is_special = hn::Gt(magnitude, hn::Set(d32, 0x7BFFu));
  return hn::BitCast(df, hn::Or(hn::IfThenElse(is_special, special, number), sign));
#else
  const hn::Rebind<hwy::float16_t, DF> d16;
  return hn::PromoteTo(df, hn::LoadU(d16, p));
#endif
}

template <class DF>
HWY_INLINE hn::Vec<DF> load_f32(DF df, const std::int8_t* p) {
  const hn::Rebind<std::int8_t, DF> d8;
  const hn::Rebind<std::int32_t, DF> d32;
  return hn::ConvertTo(df, hn::PromoteTo(d32, hn::LoadU(d8, p)));
}

// e4m3fn: sign, 4 bits of exponent with bias 7, 3 of mantissa; all ones is NaN, there is no infinity. The subnormals
// are converted as integers: as float32 bit patterns they would be subnormal too, which is slow on some processors.
template <class DF>
HWY_INLINE hn::Vec<DF> load_f32(DF df, const Fp8* p) {
  const hn::Rebind<std::uint8_t, DF> d8;
  const hn::Rebind<std::uint32_t, DF> d32;
  const auto bits = hn::PromoteTo(d32, hn::LoadU(d8, reinterpret_cast<const std::uint8_t*>(p)));
  const auto magnitude = hn::And(bits, hn::Set(d32, 0x7Fu));
  const auto sign = hn::ShiftLeft<24>(hn::And(bits, hn::Set(d32, 0x80u)));
  const auto exponent = hn::ShiftRight<3>(magnitude);
  const auto mantissa = hn::And(magnitude, hn::Set(d32, 7u));
  const auto is_normal = hn::Ne(exponent, hn::Zero(d32));
  const auto normal =
      hn::BitCast(df, hn::Or(hn::ShiftLeft<23>(hn::Add(exponent, hn::Set(d32, 120u))), hn::ShiftLeft<20>(mantissa)));
  const hn::Rebind<std::int32_t, DF> di32;
  const auto subnormal = hn::Mul(hn::ConvertTo(df, hn::BitCast(di32, mantissa)), hn::Set(df, 0x1p-9f));
  const auto value = hn::IfThenElse(hn::RebindMask(df, is_normal), normal, subnormal);
  const auto is_nan = hn::RebindMask(df, hn::Eq(magnitude, hn::Set(d32, 0x7Fu)));
  const auto nan = hn::BitCast(df, hn::Set(d32, 0x7FC00000u));
  return hn::Or(hn::IfThenElse(is_nan, nan, value), hn::BitCast(df, sign));
}

// Two vectors of neighbours at a time, of which bfloat16 on x86 gives the even elements and then the odd ones: one load
// and two instructions, where one vector after the other takes two and four. What they are multiplied with or added to
// lies in the same order (in_pairs, from_pairs). Of a row that does not end with a pair, the last vector is plain.
template <class T>
inline constexpr bool kEvenOddPairs = std::is_same_v<T, hwy::bfloat16_t> && (HWY_ARCH_X86) && HWY_TARGET != HWY_SCALAR;

template <class DF, class T>
HWY_INLINE void load_pair(DF df, const T* p, hn::Vec<DF>& first, hn::Vec<DF>& second) {
  if constexpr (kEvenOddPairs<T>) {
    const hn::Repartition<std::uint16_t, DF> d16;
    const hn::RebindToUnsigned<DF> d32;
    const auto both = hn::BitCast(d32, hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(p)));
    first = hn::BitCast(df, hn::ShiftLeft<16>(both));
    second = hn::BitCast(df, hn::And(both, hn::Set(d32, 0xFFFF0000u)));
  } else {
    first = load_f32(df, p);
    second = load_f32(df, p + hn::Lanes(df));
  }
}

// A row of `dim` floats in the order of load_pair, and back.
template <class T, class DF>
HWY_INLINE void in_pairs(DF df, const float* row, int dim, float* out) {
  const int lanes = static_cast<int>(hn::Lanes(df));
  int i = 0;
  for (; kEvenOddPairs<T> && i + 2 * lanes <= dim; i += 2 * lanes) {
    hn::Vec<DF> even, odd;
    hn::LoadInterleaved2(df, row + i, even, odd);
    hn::StoreU(even, df, out + i);
    hn::StoreU(odd, df, out + i + lanes);
  }
  for (; i < dim; i += lanes) hn::StoreU(hn::LoadU(df, row + i), df, out + i);
}
template <class T, class DF>
HWY_INLINE void from_pairs(DF df, const float* row, int dim, float* out) {
  const int lanes = static_cast<int>(hn::Lanes(df));
  int i = 0;
  for (; kEvenOddPairs<T> && i + 2 * lanes <= dim; i += 2 * lanes) {
    hn::StoreInterleaved2(hn::LoadU(df, row + i), hn::LoadU(df, row + i + lanes), df, out + i);
  }
  for (; i < dim; i += lanes) hn::StoreU(hn::LoadU(df, row + i), df, out + i);
}

// body(vectors of a row of `dim` elements): head dims are multiples of 8, so where a full vector does not divide one, a
// vector of 8 does.
template <class Body>
HWY_INLINE void with_lanes_for(int dim, const Body& body) {
  const hn::ScalableTag<float> df;
  if (dim % static_cast<int>(hn::Lanes(df)) == 0) {
    body(df);
  } else {
    body(hn::CappedTag<float, 8>());
  }
}

template <class T>
HWY_INLINE const T* row_as(const TileRows& tile, int token, int head) {
  return reinterpret_cast<const T*>(tile.rows[token] + head * tile.head_bytes);
}

// The rows of four tokens, one head after the other.
template <class T>
struct FourRows {
  const T *a, *b, *c, *d;
  HWY_INLINE FourRows(const TileRows& tile, int token)
      : a(row_as<T>(tile, token, 0)),
        b(row_as<T>(tile, token + 1, 0)),
        c(row_as<T>(tile, token + 2, 0)),
        d(row_as<T>(tile, token + 3, 0)) {}
  HWY_INLINE void next_head(std::ptrdiff_t head_bytes) {
    for (const T** row : {&a, &b, &c, &d}) {
      *row = reinterpret_cast<const T*>(reinterpret_cast<const std::byte*>(*row) + head_bytes);
    }
  }
};

// Sequential streams that K and V are read in (TileOps::streams).
inline constexpr int kStreams = HWY_ARCH_X86 ? 1 : 4;
inline constexpr int kStreamsOfShortRows = HWY_ARCH_X86 ? 4 : 0;

// Rows that a decode will want, fetched while it works. On x86, where a core has few reads on their way by itself.
// Elsewhere the processor is left alone.
#if HWY_ARCH_X86
using ComingRows = RowsAhead;
// The line of the i-th element of each of four rows at work, `behind` bytes on. Four words, not a loop or a lambda: GCC
// 12 drops calls of what does nothing but prefetch.
template <class T>
HWY_INLINE void fetch_line(std::ptrdiff_t behind, int i, const T* a, const T* b, const T* c, const T* d) {
  __builtin_prefetch(reinterpret_cast<const std::byte*>(a + i) + behind, 0, 3);
  __builtin_prefetch(reinterpret_cast<const std::byte*>(b + i) + behind, 0, 3);
  __builtin_prefetch(reinterpret_cast<const std::byte*>(c + i) + behind, 0, 3);
  __builtin_prefetch(reinterpret_cast<const std::byte*>(d + i) + behind, 0, 3);
}
// What goes with kVectors vectors from there on.
template <int kVectors, class T, class DF>
HWY_INLINE void fetch_with(DF df, std::ptrdiff_t behind, int i, const T* a, const T* b, const T* c, const T* d) {
  constexpr int kLine = 64 / static_cast<int>(sizeof(T));
  constexpr int kCount = kVectors * static_cast<int>(hn::MaxLanes(df));
  static_assert(kCount <= 2 * kLine);
  if (kCount >= kLine || i % kLine == 0) fetch_line(behind, i, a, b, c, d);
  if constexpr (kCount > kLine) fetch_line(behind, i + kLine, a, b, c, d);
}
#else
struct ComingRows {
  HWY_INLINE ComingRows(const TileRows&, int, const Ahead&, int, int) {}
  HWY_INLINE void begin(int) {}
  HWY_INLINE std::ptrdiff_t with_head(int) const { return 0; }
};
template <class T>
HWY_INLINE void fetch_line(std::ptrdiff_t, int, const T*, const T*, const T*, const T*) {}
template <int kVectors, class T, class DF>
HWY_INLINE void fetch_with(DF, std::ptrdiff_t, int, const T*, const T*, const T*, const T*) {}
#endif

// The arithmetic of merge/operator-inl.h on vectors.
template <class DF>
struct VectorOps {
  using V = hn::Vec<DF>;
  static HWY_INLINE V set(float x) { return hn::Set(DF(), x); }
  static HWY_INLINE V add(V a, V b) { return hn::Add(a, b); }
  static HWY_INLINE V sub(V a, V b) { return hn::Sub(a, b); }
  static HWY_INLINE V mul(V a, V b) { return hn::Mul(a, b); }
  static HWY_INLINE V fma(V a, V b, V c) { return hn::MulAdd(a, b, c); }
  // b when it is NaN, which Highway leaves open: some targets' instruction prefers the number.
  static HWY_INLINE V max(V a, V b) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_SSE4
    return hn::Max(a, b);
#elif HWY_TARGET == HWY_NEON
    if constexpr (sizeof(a.raw) == 16) {
      return V(vmaxq_f32(a.raw, b.raw));
    } else {
      return hn::IfThenElse(hn::Gt(a, b), a, b);
    }
#else
    return hn::IfThenElse(hn::Gt(a, b), a, b);
#endif
  }
  static HWY_INLINE V min(V a, V b) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_SSE4
    return hn::Min(a, b);
#elif HWY_TARGET == HWY_NEON
    if constexpr (sizeof(a.raw) == 16) {
      return V(vminq_f32(a.raw, b.raw));
    } else {
      return hn::IfThenElse(hn::Lt(a, b), a, b);
    }
#else
    return hn::IfThenElse(hn::Lt(a, b), a, b);
#endif
  }
  // As ScalarOps::times_power_of_two; AVX-512 has an instruction for it, with the same bits.
  static HWY_INLINE V times_power_of_two(V p, V shifted) {
#if HWY_TARGET == HWY_AVX3
    if constexpr (sizeof(p.raw) == 64) {
      return V{_mm512_scalef_ps(p.raw, hn::Sub(shifted, set(merge::kExp2Shifter)).raw)};
    }
#endif
    const hn::RebindToUnsigned<DF> du;
    const auto power = hn::Add(hn::ShiftLeft<23>(hn::BitCast(du, shifted)), hn::Set(du, 0x3f800000u));
    return hn::Mul(p, hn::BitCast(DF(), power));
  }
};

#define TREEATTN_MERGE_FN HWY_INLINE
#include "merge/operator-inl.h"
#undef TREEATTN_MERGE_FN

}  // namespace HWY_NAMESPACE
}  // namespace treeattn::kernels
HWY_AFTER_NAMESPACE();

#endif
