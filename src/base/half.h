// SPDX-License-Identifier: Apache-2.0
// Exact scalar conversions between float32 and the storage types; the SIMD kernels are tested against these.
//
// To a narrower type: round to nearest, ties to even, denormals included. A NaN stays a NaN of the same sign and
// becomes quiet. From a narrower type every value is exact.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "treeattn/dtype.h"

namespace treeattn::base {

namespace detail {

inline constexpr std::uint32_t kSignBit = 0x80000000u;
inline constexpr std::uint32_t kInfBits = 0x7f800000u;
inline constexpr std::uint32_t kQuietBit = 0x00400000u;

// value / 2^shift, rounded to nearest even. Requires 1 <= shift <= 31 and value + 2^(shift - 1) < 2^32.
constexpr std::uint32_t shift_round_even(std::uint32_t value, int shift) {
  const std::uint32_t half_less_one = (1u << (shift - 1)) - 1u;
  return (value + half_less_one + ((value >> shift) & 1u)) >> shift;
}

// A positive float below the smallest normal number of a narrower type, as a multiple of that type's smallest denormal
// 2^unit_exponent, rounded. `magnitude` is the float's bits without the sign.
constexpr std::uint32_t denormal_units(std::uint32_t magnitude, int unit_exponent) {
  const int exponent = static_cast<int>(magnitude >> 23);
  const int shift = unit_exponent + 150 - exponent;  // the float is significand * 2^(exponent - 150)
  if (shift > 24) return 0;                          // below half a unit; a float denormal lands here too
  return shift_round_even((magnitude & 0x007fffffu) | 0x00800000u, shift);
}

}  // namespace detail

constexpr std::uint16_t float_to_float16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits & detail::kSignBit) >> 16;
  const std::uint32_t magnitude = bits & ~detail::kSignBit;
  std::uint32_t result = 0;
  if (magnitude > detail::kInfBits) {
    result = 0x7e00u | ((magnitude >> 13) & 0x01ffu);
  } else if (magnitude >= 0x477ff000u) {  // 65520, half way between the largest float16 and the next power of two
    result = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // 2^-14, the smallest normal float16
    result = detail::denormal_units(magnitude, -24);
  } else {
    result = detail::shift_round_even(magnitude - ((127u - 15u) << 23), 13);
  }
  return static_cast<std::uint16_t>(sign | result);
}

constexpr float float16_to_float(std::uint16_t half) {
  const std::uint32_t sign = (half & 0x8000u) << 16;
  const std::uint32_t exponent = (half >> 10) & 0x1fu;
  const std::uint32_t mantissa = half & 0x03ffu;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
  }
  if (exponent == 0x1fu) {
    const std::uint32_t quiet = mantissa != 0 ? detail::kQuietBit : 0u;
    return std::bit_cast<float>(sign | detail::kInfBits | quiet | (mantissa << 13));
  }
  return std::bit_cast<float>(sign | ((exponent + 127u - 15u) << 23) | (mantissa << 13));
}

constexpr std::uint16_t float_to_bfloat16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const bool nan = (bits & ~detail::kSignBit) > detail::kInfBits;
  // bfloat16 is the upper half of a float, so a carry out of the mantissa is the right exponent, infinity at the end.
  // Without a branch, so that rows are converted by vectors.
  const std::uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return static_cast<std::uint16_t>((nan ? bits | detail::kQuietBit : rounded) >> 16);
}

constexpr float bfloat16_to_float(std::uint16_t half) {
  const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
  const bool nan = (bits & ~detail::kSignBit) > detail::kInfBits;
  return std::bit_cast<float>(nan ? bits | detail::kQuietBit : bits);
}

// The largest fp8 e4m3fn, 0x7e.
inline constexpr float kMaxFp8 = 448.0f;

// Saturating: anything beyond +-448, infinities included, becomes +-448 (the OCP 8-bit format's saturating mode).
constexpr std::uint8_t float_to_fp8(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits & detail::kSignBit) >> 24;
  const std::uint32_t magnitude = bits & ~detail::kSignBit;
  std::uint32_t result = 0;
  if (magnitude > detail::kInfBits) {
    result = 0x7fu;
  } else if (magnitude >= std::bit_cast<std::uint32_t>(kMaxFp8)) {
    result = 0x7eu;
  } else if (magnitude < 0x3c800000u) {  // 2^-6, the smallest normal number
    result = detail::denormal_units(magnitude, -9);
  } else {
    result = detail::shift_round_even(magnitude - ((127u - 7u) << 23), 20);
  }
  return static_cast<std::uint8_t>(sign | result);
}

constexpr float fp8_to_float(std::uint8_t fp8) {
  const std::uint32_t sign = (fp8 & 0x80u) << 24;
  const std::uint32_t exponent = (fp8 >> 3) & 0x0fu;
  const std::uint32_t mantissa = fp8 & 0x07u;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-9f;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
  }
  if (exponent == 0x0fu && mantissa == 0x07u) {
    return std::bit_cast<float>(sign | detail::kInfBits | detail::kQuietBit);
  }
  return std::bit_cast<float>(sign | ((exponent + 127u - 7u) << 23) | (mantissa << 20));
}

// The element at `element` (aligned or not), without its row scale.
inline float load_as_float(const void* element, DType dtype) {
  float wide = 0.0f;
  std::uint16_t half = 0;
  std::uint8_t byte = 0;
  switch (dtype) {
    case DType::kFloat32:
      std::memcpy(&wide, element, sizeof wide);
      return wide;
    case DType::kFloat16:
      std::memcpy(&half, element, sizeof half);
      return float16_to_float(half);
    case DType::kBFloat16:
      std::memcpy(&half, element, sizeof half);
      return bfloat16_to_float(half);
    case DType::kInt8:
      std::memcpy(&byte, element, sizeof byte);
      return static_cast<float>(static_cast<std::int8_t>(byte));
    case DType::kFp8E4M3:
      std::memcpy(&byte, element, sizeof byte);
      return fp8_to_float(byte);
  }
  return std::numeric_limits<float>::quiet_NaN();
}

// A row of n elements, without its scale.
inline void load_row_as_float(const void* row, DType dtype, std::int64_t n, float* out) {
  if (dtype == DType::kFloat32) {
    std::memcpy(out, row, static_cast<std::size_t>(n) * sizeof(float));
    return;
  }
  const auto size = static_cast<std::int64_t>(dtype_size(dtype));
  const auto* element = static_cast<const std::byte*>(row);
  for (std::int64_t i = 0; i < n; ++i) out[i] = load_as_float(element + i * size, dtype);
}

// Rounds `value` to `dtype` and stores it. int8 rounds to the nearest integer and saturates at +-127; NaN becomes 0.
inline void store_from_float(void* element, float value, DType dtype) {
  std::uint16_t half = 0;
  std::uint8_t byte = 0;
  switch (dtype) {
    case DType::kFloat32:
      std::memcpy(element, &value, sizeof value);
      return;
    case DType::kFloat16:
      half = float_to_float16(value);
      std::memcpy(element, &half, sizeof half);
      return;
    case DType::kBFloat16:
      half = float_to_bfloat16(value);
      std::memcpy(element, &half, sizeof half);
      return;
    case DType::kInt8: {
      const float clamped = value != value ? 0.0f : value > 127.0f ? 127.0f : value < -127.0f ? -127.0f : value;
      byte = static_cast<std::uint8_t>(static_cast<std::int8_t>(std::nearbyint(clamped)));
      std::memcpy(element, &byte, sizeof byte);
      return;
    }
    case DType::kFp8E4M3:
      byte = float_to_fp8(value);
      std::memcpy(element, &byte, sizeof byte);
      return;
  }
}

// A row of n elements, each by store_from_float. The loop is inside each case, so that it can be vectorised.
inline void store_row_from_float(const float* in, std::size_t n, DType dtype, void* row) {
  auto* out = static_cast<std::byte*>(row);
  switch (dtype) {
    case DType::kFloat32:
      std::memcpy(out, in, n * sizeof(float));
      return;
    case DType::kFloat16:
      for (std::size_t i = 0; i < n; ++i) store_from_float(out + 2 * i, in[i], DType::kFloat16);
      return;
    case DType::kBFloat16:
      for (std::size_t i = 0; i < n; ++i) store_from_float(out + 2 * i, in[i], DType::kBFloat16);
      return;
    case DType::kInt8:
      for (std::size_t i = 0; i < n; ++i) store_from_float(out + i, in[i], DType::kInt8);
      return;
    case DType::kFp8E4M3:
      for (std::size_t i = 0; i < n; ++i) store_from_float(out + i, in[i], DType::kFp8E4M3);
      return;
  }
}

// Of a row of K or V: the least that is no subnormal number. Weights in fixed point are relative to the largest weight
// with its value's scale, and that should be one of a row that adds something.
inline constexpr float kScaleOfZeroRow = 0x1p-126f;

// The scale with which numbers up to `largest`, which is finite, become numbers up to `most`: the quotient, or
// of_zeros. A subnormal quotient may be rounded down, as far as to 0, so that the largest would not fit. It is then the
// next one; all larger scales stay what they are.
constexpr float scale_to_fit(float largest, float most, float of_zeros = 1.0f) {
  if (largest == 0.0f) return of_zeros;
  const float scale = largest / most;
  return scale * most < largest ? scale + std::numeric_limits<float>::denorm_min() : scale;
}

// Symmetric int8: in[i] ~ out[i] * *scale with *scale = max |in| / 127 (scale_to_fit). A row with a NaN or an infinity
// gets scale NaN and zeros, so that whatever reads it says so.
inline void quantize_row_int8(const float* in, std::size_t n, std::int8_t* out, float* scale, float of_zeros = 1.0f) {
  float largest = 0.0f;
  bool finite = true;
  for (std::size_t i = 0; i < n; ++i) {
    const float magnitude = std::fabs(in[i]);
    finite = finite && magnitude <= std::numeric_limits<float>::max();
    largest = magnitude > largest ? magnitude : largest;
  }
  if (!finite) {
    *scale = std::numeric_limits<float>::quiet_NaN();
    for (std::size_t i = 0; i < n; ++i) out[i] = 0;
    return;
  }
  *scale = scale_to_fit(largest, 127.0f, of_zeros);
  for (std::size_t i = 0; i < n; ++i) store_from_float(&out[i], in[i] / *scale, DType::kInt8);
}

// fp8 with in[i] ~ out[i] * *scale and *scale = max |in| / 448 over the finite elements (scale_to_fit). A NaN stays a
// NaN, and an infinity, for which the format has no code, becomes one.
inline void quantize_row_fp8(const float* in, std::size_t n, std::uint8_t* out, float* scale) {
  float largest = 0.0f;
  for (std::size_t i = 0; i < n; ++i) {
    const float magnitude = std::fabs(in[i]);
    largest = magnitude > largest && magnitude <= std::numeric_limits<float>::max() ? magnitude : largest;
  }
  *scale = scale_to_fit(largest, kMaxFp8, kScaleOfZeroRow);
  for (std::size_t i = 0; i < n; ++i) {
    const float finite_or_nan = in[i] - in[i] == 0.0f ? in[i] / *scale : std::numeric_limits<float>::quiet_NaN();
    out[i] = float_to_fp8(finite_or_nan);
  }
}

}  // namespace treeattn::base
