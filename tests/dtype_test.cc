// SPDX-License-Identifier: Apache-2.0
// Element types: names, and conversions checked against arithmetic for every bit pattern.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "base/half.h"
#include "treeattn/dtype.h"
#include "treeattn/error.h"

namespace treeattn {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// A small floating-point format, decoded and rounded by arithmetic on doubles instead of by shifting bits.
struct Format {
  int exponent_bits;
  int mantissa_bits;
  bool finite_only;  // e4m3fn: the top exponent holds numbers, only all ones is NaN

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  unsigned magnitudes() const { return 1u << (exponent_bits + mantissa_bits); }

  double decode(unsigned bits) const {
    const double sign = (bits & magnitudes()) != 0 ? -1.0 : 1.0;
    const unsigned magnitude = bits & (magnitudes() - 1);
    const int exponent = static_cast<int>(magnitude >> mantissa_bits);
    const int mantissa = static_cast<int>(magnitude & ((1u << mantissa_bits) - 1));
    const int top = (1 << exponent_bits) - 1;
    if (finite_only && magnitude == magnitudes() - 1) return std::nan("");
    if (!finite_only && exponent == top) return mantissa == 0 ? sign * kInf : std::nan("");
    if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias() - mantissa_bits);
    return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias() - mantissa_bits);
  }
};

constexpr Format kFloat16{5, 10, false};
constexpr Format kBFloat16{8, 7, false};
constexpr Format kFp8{4, 3, true};

bool same_value(double a, double b) {
  return (std::isnan(a) && std::isnan(b)) || (a == b && std::signbit(a) == std::signbit(b));
}

// Every pattern decodes to its value and encodes back to itself; between two neighbours the float just below the middle
// goes down, the one just above goes up, and the middle goes to the even one.
template <typename Bits, typename Decode, typename Encode>
void check_format(const Format& format, Decode decode, Encode encode) {
  const unsigned count = 2 * format.magnitudes();
  for (unsigned bits = 0; bits < count; ++bits) {
    const float value = decode(static_cast<Bits>(bits));
    const double want = format.decode(bits);
    ASSERT_TRUE(same_value(value, want)) << "bits " << bits << ": " << value << " instead of " << want;
    const unsigned back = encode(value);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(format.decode(back))) << "bits " << bits;
      EXPECT_EQ(back & format.magnitudes(), bits & format.magnitudes()) << "sign of NaN " << bits;
    } else {
      ASSERT_EQ(back, bits);
    }

    const double next = format.decode(bits + 1);
    if ((bits & (format.magnitudes() - 1)) == format.magnitudes() - 1) continue;
    if (!std::isfinite(want) || !std::isfinite(next)) continue;
    const auto middle = static_cast<float>((want + next) / 2);
    ASSERT_EQ(static_cast<double>(middle), (want + next) / 2);
    const unsigned even = bits % 2 == 0 ? bits : bits + 1;
    ASSERT_EQ(encode(middle), even) << "middle above " << bits;
    ASSERT_EQ(encode(std::nextafter(middle, static_cast<float>(want))), bits) << "below the middle above " << bits;
    ASSERT_EQ(encode(std::nextafter(middle, static_cast<float>(next))), bits + 1) << "above the middle " << bits;
  }
}

TEST(DTypeTest, Float16IsExactAndRoundsToNearestEven) {
  check_format<std::uint16_t>(kFloat16, base::float16_to_float, base::float_to_float16);
}

TEST(DTypeTest, BFloat16IsExactAndRoundsToNearestEven) {
  check_format<std::uint16_t>(kBFloat16, base::bfloat16_to_float, base::float_to_bfloat16);
}

TEST(DTypeTest, Fp8IsExactAndRoundsToNearestEven) {
  check_format<std::uint8_t>(kFp8, base::fp8_to_float, base::float_to_fp8);
}

TEST(DTypeTest, BeyondTheLargest) {
  EXPECT_EQ(base::float_to_float16(65519.996f), 0x7bff);
  EXPECT_EQ(base::float_to_float16(65520.0f), 0x7c00);
  EXPECT_EQ(base::float_to_float16(-1e30f), 0xfc00);
  EXPECT_EQ(base::float_to_float16(-kInf), 0xfc00);
  EXPECT_EQ(base::float_to_bfloat16(std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_EQ(base::float_to_bfloat16(kInf), 0x7f80);
  EXPECT_EQ(base::float_to_fp8(449.0f), 0x7e);
  EXPECT_EQ(base::float_to_fp8(479.0f), 0x7e);
  EXPECT_EQ(base::float_to_fp8(1e30f), 0x7e);
  EXPECT_EQ(base::float_to_fp8(-kInf), 0xfe);
}

TEST(DTypeTest, BelowTheSmallest) {
  EXPECT_EQ(base::float_to_float16(0x1p-25f), 0x0000);
  EXPECT_EQ(base::float_to_float16(0x1.000002p-25f), 0x0001);
  EXPECT_EQ(base::float_to_float16(-0x1p-149f), 0x8000);
  EXPECT_EQ(base::float_to_bfloat16(0x1p-149f), 0x0000);
  EXPECT_EQ(base::float_to_bfloat16(-0x1p-133f), 0x8001);
  EXPECT_EQ(base::float_to_fp8(0x1p-10f), 0x00);
  EXPECT_EQ(base::float_to_fp8(-0x1.1p-10f), 0x81);
}

TEST(DTypeTest, NanStaysNanAndBecomesQuiet) {
  for (const std::uint32_t bits : {0x7f800001u, 0x7fc00000u, 0x7fffffffu, 0xff800001u, 0xffc12345u}) {
    const float nan = std::bit_cast<float>(bits);
    const std::uint32_t sign = bits >> 31;
    const std::uint16_t half = base::float_to_float16(nan);
    EXPECT_EQ(half & 0x7e00, 0x7e00) << std::hex << bits;
    EXPECT_EQ(half >> 15, static_cast<int>(sign));
    const std::uint16_t brain = base::float_to_bfloat16(nan);
    EXPECT_EQ(brain & 0x7fc0, 0x7fc0) << std::hex << bits;
    EXPECT_EQ(brain >> 15, static_cast<int>(sign));
    EXPECT_EQ(base::float_to_fp8(nan), sign != 0 ? 0xff : 0x7f);
  }
  // A signalling NaN of a narrow type comes back quiet too.
  EXPECT_NE(std::bit_cast<std::uint32_t>(base::float16_to_float(0x7c01)) & 0x00400000u, 0u);
  EXPECT_NE(std::bit_cast<std::uint32_t>(base::bfloat16_to_float(0xff81)) & 0x00400000u, 0u);
}

TEST(DTypeTest, ConversionsAreConstexpr) {
  static_assert(base::float16_to_float(base::float_to_float16(1.5f)) == 1.5f);
  static_assert(base::bfloat16_to_float(base::float_to_bfloat16(-3.0f)) == -3.0f);
  static_assert(base::fp8_to_float(base::float_to_fp8(448.0f)) == 448.0f);
}

TEST(DTypeTest, LoadsFromUnalignedMemory) {
  for (const DType dtype : kAllDTypes) {
    std::vector<std::byte> memory(9, std::byte{0});
    base::store_from_float(memory.data() + 1, -1.5f, dtype);
    const float want = dtype == DType::kInt8 ? -2.0f : -1.5f;
    EXPECT_EQ(base::load_as_float(memory.data() + 1, dtype), want) << dtype_name(dtype);
    EXPECT_EQ(memory[0], std::byte{0});
    EXPECT_EQ(memory[1 + dtype_size(dtype)], std::byte{0});
  }
}

TEST(DTypeTest, Int8ConversionSaturates) {
  std::int8_t stored = 0;
  const auto store = [&](float value) {
    base::store_from_float(&stored, value, DType::kInt8);
    return static_cast<int>(stored);
  };
  EXPECT_EQ(store(126.5f), 126);
  EXPECT_EQ(store(-125.5f), -126);
  EXPECT_EQ(store(1e30f), 127);
  EXPECT_EQ(store(-kInf), -127);
  EXPECT_EQ(store(kNan), 0);
}

TEST(DTypeTest, QuantisedRowsAreWithinHalfAStep) {
  const std::vector<float> rows[] = {
      {1.0f, -2.0f, 0.3f, 127.0f}, {-1e-3f, 5e-4f, 0.0f, 1e-5f}, {3e38f, -1e38f, 1.0f, 2e37f}, {1e-42f, -3e-42f, 0, 0}};
  for (const auto& row : rows) {
    std::vector<std::int8_t> quantised(row.size());
    float scale = 0.0f;
    base::quantize_row_int8(row.data(), row.size(), quantised.data(), &scale);
    float largest = 0.0f;
    for (const float x : row) largest = std::max(largest, std::fabs(x));
    EXPECT_NEAR(scale, largest / 127.0f, largest * 1e-6f + 2e-45f);
    for (std::size_t i = 0; i < row.size(); ++i) {
      const double back = static_cast<double>(scale) * quantised[i];
      EXPECT_LE(std::fabs(back - static_cast<double>(row[i])), 0.5000002 * static_cast<double>(scale)) << row[i];
    }
  }
}

TEST(DTypeTest, QuantisedRowOfZerosHasScaleOne) {
  const float zeros[] = {0.0f, -0.0f, 0.0f};
  std::int8_t quantised[] = {1, 1, 1};
  float scale = 0.0f;
  base::quantize_row_int8(zeros, 3, quantised, &scale);
  EXPECT_EQ(scale, 1.0f);
  for (const std::int8_t x : quantised) EXPECT_EQ(x, 0);
}

TEST(DTypeTest, QuantisedRowWithoutARangeSaysSo) {
  for (const float bad : {kNan, kInf, -kInf}) {
    const float row[] = {1.0f, bad, 2.0f};
    std::int8_t quantised[3] = {};
    float scale = 0.0f;
    base::quantize_row_int8(row, 3, quantised, &scale);
    EXPECT_TRUE(std::isnan(scale)) << bad;
  }
}

TEST(DTypeTest, TinyRowsDoNotDivideByZero) {
  const float row[] = {0x1p-149f, -0x3p-149f, 0.0f};
  std::int8_t quantised[3] = {};
  float scale = 0.0f;
  base::quantize_row_int8(row, 3, quantised, &scale);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(scale * static_cast<float>(quantised[i]), row[i]);
}

// Where the scale is subnormal, too, the largest number of a row fits: in int8 all are within half a step, in fp8
// within half of its last bit.
TEST(DTypeTest, TinyRowsFit) {
  for (int units = 1; units < 200'000; units += 1 + units / 50) {
    const float most = std::ldexp(static_cast<float>(units), -149);
    const float row[] = {most, -most, most / 2, most / 3, most / 127, most / 448};
    std::int8_t bytes[6] = {};
    std::uint8_t codes[6] = {};
    float scale = 0.0f, fp8_scale = 0.0f;
    base::quantize_row_int8(row, 6, bytes, &scale);
    base::quantize_row_fp8(row, 6, codes, &fp8_scale);
    for (std::size_t i = 0; i < 6; ++i) {
      const double x = row[i];
      const double step = scale, code_step = std::max(std::fabs(x) * 0x1p-3, fp8_scale * 0x1p-9);
      EXPECT_LE(std::fabs(bytes[i] * step - x), 0.50001 * step) << units << " " << i;
      const double code = base::fp8_to_float(codes[i]);
      EXPECT_LE(std::fabs(code * double{fp8_scale} - x), 0.50001 * code_step) << units << " " << i;
    }
  }
}

TEST(DTypeTest, NamesRoundTrip) {
  for (const DType dtype : kAllDTypes) EXPECT_EQ(parse_dtype(dtype_name(dtype)), dtype);
  EXPECT_EQ(parse_dtype("f32"), DType::kFloat32);
  EXPECT_EQ(parse_dtype("f16"), DType::kFloat16);
  EXPECT_EQ(parse_dtype("bf16"), DType::kBFloat16);
}

TEST(DTypeTest, UnknownNamesAreRefusedByName) {
  for (const char* name : {"", "float64", "FLOAT32", "fp8 "}) {
    try {
      parse_dtype(name);
      ADD_FAILURE() << "accepted \"" << name << "\"";
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find("\"" + std::string(name) + "\""), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("bfloat16"), std::string::npos) << error.what();
    }
  }
}

TEST(DTypeTest, Sizes) {
  EXPECT_EQ(dtype_size(DType::kFloat32), 4u);
  EXPECT_EQ(dtype_size(DType::kFloat16), 2u);
  EXPECT_EQ(dtype_size(DType::kBFloat16), 2u);
  EXPECT_EQ(dtype_size(DType::kInt8), 1u);
  EXPECT_EQ(dtype_size(DType::kFp8E4M3), 1u);
  EXPECT_THROW(dtype_size(static_cast<DType>(99)), InvalidArgument);
}

}  // namespace
}  // namespace treeattn
