// SPDX-License-Identifier: Apache-2.0
// u is the unit roundoff. A number that went through n roundings is off by at most n u / (1 - n u) of its size; the
// bounds say 1.01 n u, for n u < 0.009.
#include "kernels/reference/model_reference.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "base/half.h"

namespace treeattn::kernels {
namespace {

constexpr double kUnit = 0x1p-24;
constexpr double kTiny = 0x1p-126;  // the smallest normal float32; results below it lose their relative precision
constexpr double kNearOverflow = 1e38;

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

void add(BoundedValues& to, double value, double bound, bool may_overflow) {
  to.value.push_back(value);
  to.bound.push_back(!std::isfinite(value) ? 0.0
                     : may_overflow        ? std::numeric_limits<double>::infinity()
                                           : 1.01 * bound);
}

double to_bfloat16(double x) { return base::bfloat16_to_float(base::float_to_bfloat16(static_cast<float>(x))); }

double weight_at(const WeightMatrix& w, std::int64_t row, std::int64_t col) {
  const std::int64_t at = row * w.cols + col;
  const auto* element = static_cast<const std::byte*>(w.data) + index(at) * dtype_size(w.dtype);
  const double value = base::load_as_float(element, w.dtype);
  return w.dtype == DType::kInt8 ? value * w.scales[at / w.group] : value;
}

}  // namespace

// A sum of n products in any order: each product goes through its own rounding and n - 1 additions, so n roundings of
// its size. With int8 the products of a group are summed exactly, and what is added up are groups, each a product with
// a product of scales (2 roundings); within a group lanes may be kept apart up to the end (kWeightGroup more). Where
// activations are bfloat16 a group's products are exact and their sum is not (as many more), and only the weights have
// scales. One more for adding to y, and one for BF16 instructions, which round a product before they add it to its
// neighbour. Where a product of scales is subnormal its rounding is half a unit of 2^-149, times an integer: for each
// column up to 127 * 128.
double linear_roundings(const WeightMatrix& w, const LinearModel& model) {
  const bool by_groups = w.dtype == DType::kInt8 && !model.weights_in_bfloat16;
  const std::int64_t terms = by_groups ? w.cols / w.group + kWeightGroup : w.cols;
  return static_cast<double>(terms + 3);
}

std::vector<double> rounded_activations(std::span<const float> row, Activations activations) {
  std::vector<double> result(row.begin(), row.end());
  if (activations == Activations::kBFloat16) {
    for (double& x : result) x = to_bfloat16(x);
  }
  if (activations == Activations::kInt8Groups) {
    for (std::size_t begin = 0; begin < row.size(); begin += kWeightGroup) {
      std::int8_t values[kWeightGroup];
      float scale = 0;
      base::quantize_row_int8(row.data() + begin, kWeightGroup, values, &scale);
      for (std::size_t i = 0; i < kWeightGroup; ++i) result[begin + i] = static_cast<double>(values[i]) * scale;
    }
  }
  return result;
}

BoundedValues reference_linear(const WeightMatrix& w, std::span<const float> x, std::span<const float> before,
                               const LinearModel& model) {
  const auto cols = index(w.cols);
  // What is lost where numbers are subnormal: of every result, and of every factor, times the other one.
  const double lost = model.flushes_subnormals ? kTiny : 0.0;
  const bool by_scales = model.activations == Activations::kInt8Groups;
  const double half_units = by_scales ? 3 + 127 * 128 : 3;
  BoundedValues result;
  for (std::size_t row = 0; row < x.size() / cols; ++row) {
    const std::vector<double> rounded = rounded_activations(x.subspan(row * cols, cols), model.activations);
    for (std::int64_t n = 0; n < w.rows; ++n) {
      const double start = before.empty() ? 0.0 : before[row * index(w.rows) + index(n)];
      double sum = start, size = 0.0, floor = 0.0, scales = 0.0;
      const auto add_size = [&](double term) { size += std::isfinite(term) ? std::fabs(term) : 0.0; };
      add_size(start);
      bool infinite_or_nan = false;
      for (std::int64_t col = 0; col < w.cols; ++col) {
        const double a = rounded[index(col)], weight = weight_at(w, n, col);
        const double b = model.weights_in_bfloat16 ? to_bfloat16(weight) : weight;
        sum += a * b;
        add_size(a * b);
        floor += half_units * kTiny * model.unit_roundoff + lost * (3 + std::fabs(a) + std::fabs(b));
        // The largest of a group is 127 times its scale. Scales may overflow together though no product does.
        if (by_scales) scales = std::max(scales, std::fabs(a) / 127 * w.scales[(n * w.cols + col) / w.group]);
        // An infinity times a factor that may count as zero.
        infinite_or_nan |= std::isinf(a * b) && std::min(std::fabs(a), std::fabs(b)) < lost;
      }
      const bool may_overflow = std::max(size, scales) > kNearOverflow;
      infinite_or_nan |= std::isinf(sum) && may_overflow;  // to the other infinity
      add(result, sum, linear_roundings(w, model) * model.unit_roundoff * size + floor, may_overflow);
      if (infinite_or_nan) result.bound.back() = std::numeric_limits<double>::infinity();
    }
  }
  return result;
}

// Widening is exact; an int8 number times its scale is one rounding.
BoundedValues reference_embed(const WeightMatrix& table, std::span<const std::int32_t> tokens) {
  BoundedValues result;
  for (const std::int32_t token : tokens) {
    for (std::int64_t col = 0; col < table.cols; ++col) {
      const double value = weight_at(table, token, col);
      const double bound = table.dtype == DType::kInt8 ? kUnit * std::fabs(value) + kTiny * kUnit : 0.0;
      add(result, value, bound, std::fabs(value) > kNearOverflow);
    }
  }
  return result;
}

// The sum of dim squares: dim roundings, of positive numbers, so of the sum itself. The division and eps: 2 more.
// Squares that are subnormal are off by 2^-150 each, and so is their mean: 1 more, as a mean below 2^-126, or one that
// float32 does not hold, is computed in double. The square root halves all that and adds 1; its reciprocal and the two
// products: 3 more. The first of these may be subnormal, and off by 2^-150, before it meets the weight.
double rms_norm_roundings(std::int64_t dim) { return (static_cast<double>(dim) + 3) / 2 + 4; }

BoundedValues reference_rms_norm(std::span<const float> x, std::span<const float> weight, float eps) {
  const std::size_t dim = weight.size();
  BoundedValues result;
  for (std::size_t row = 0; row < x.size() / dim; ++row) {
    double squares = 0;
    for (std::size_t i = 0; i < dim; ++i) squares += static_cast<double>(x[row * dim + i]) * x[row * dim + i];
    const double mean = squares / static_cast<double>(dim) + static_cast<double>(eps);
    for (std::size_t i = 0; i < dim; ++i) {
      const double value = x[row * dim + i] / std::sqrt(mean) * weight[i];
      const double bound = rms_norm_roundings(static_cast<std::int64_t>(dim)) * kUnit * std::fabs(value);
      const double floor = kTiny * kUnit * (1 + std::fabs(static_cast<double>(weight[i])));
      add(result, value, bound + floor, std::fabs(value) > kNearOverflow);
    }
  }
  return result;
}

// e = exp(-|gate|) as exp2 of a product: log2(e) and the product are rounded, 2 u |gate| log2(e) in the exponent, so
// 2 u |gate| of e; exp2 itself is good to 2^-22. e counts at most twice in e / (1 + e). Sum, quotient and two products:
// 4 more. exp2 stops at 2^-126, or a little above as its argument is rounded: below that all of it may be lost, or
// 2^-126 stand for it.
double swiglu_relative_error(double gate) { return 2 * (2 * kUnit * std::fabs(gate) + 0x1p-22) + 4 * kUnit; }

BoundedValues reference_swiglu(std::span<const float> gate_up, std::int64_t dim) {
  BoundedValues result;
  for (std::size_t row = 0; row < gate_up.size() / index(2 * dim); ++row) {
    for (std::int64_t i = 0; i < dim; ++i) {
      const double gate = gate_up[row * index(2 * dim) + index(i)];
      const double up = gate_up[row * index(2 * dim) + index(dim + i)];
      double silu = gate / (1 + std::exp(-gate));
      // Something is left of every finite gate, and an infinite up shows.
      if (silu == 0 && gate < 0) silu = -std::numeric_limits<double>::denorm_min();
      const double value = silu * up;
      const double lost = std::exp(gate) < 2 * kTiny ? std::fabs(value) + kTiny * std::fabs(up) : 0.0;
      add(result, value, swiglu_relative_error(gate) * std::fabs(value) + kTiny * kUnit * (1 + std::fabs(up)) + lost,
          std::fabs(value) > kNearOverflow);
    }
  }
  return result;
}

// The angle is a double product, off by 2^-53 of itself, and so then are cosine and sine, beside 2^-52 of their own. A
// position above 2^53 is rounded to a double before, which is as much again.
// Rounded to float32, multiplied, added: 3 roundings of each of the two products.
BoundedValues reference_rope(std::span<const float> x, std::int64_t heads, std::span<const std::int64_t> positions,
                             std::span<const double> frequencies) {
  const std::size_t half = frequencies.size();
  BoundedValues result;
  for (std::size_t vector = 0; vector < x.size() / (2 * half); ++vector) {
    const std::int64_t position = positions[vector / index(heads)];
    const double unit = std::abs(position) > std::int64_t{1} << 53 ? 0x1p-52 : 0x1p-53;
    const float* from = x.data() + vector * 2 * half;
    for (std::size_t i = 0; i < 2 * half; ++i) {
      const long double angle = static_cast<long double>(position) * frequencies[i % half];
      const auto cosine = static_cast<double>(std::cos(angle)), sine = static_cast<double>(std::sin(angle));
      const double a = from[i], b = i < half ? -from[i + half] : from[i - half];
      const double off = 0x1p-52 + std::fabs(static_cast<double>(angle)) * unit;
      const double bound = 3 * kUnit * (std::fabs(a * cosine) + std::fabs(b * sine)) +
                           (std::fabs(a) + std::fabs(b)) * off + 3 * kTiny * kUnit;
      add(result, a * cosine + b * sine, bound, std::fabs(a) + std::fabs(b) > kNearOverflow);
    }
  }
  return result;
}

}  // namespace treeattn::kernels
