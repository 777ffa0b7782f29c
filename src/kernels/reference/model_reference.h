// SPDX-License-Identifier: Apache-2.0
// The operations of ModelOps in double precision by plain loops, and beside every number the error a float32 backend
// may make. Each bound is derived where it is computed; error_in_bounds (reference.h) measures against it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/activations.h"
#include "kernels/model_ops.h"

namespace treeattn::kernels {

struct BoundedValues {
  std::vector<double> value;
  std::vector<double> bound;  // infinite where float32 may overflow on the way; 0 where the value is NaN or infinite
};

// What the bound has to know of the backend it judges.
struct LinearModel {
  Activations activations = Activations::kFloat32;
  double unit_roundoff = 0x1p-24;    // of its multiplications and additions
  bool flushes_subnormals = false;   // factors and results below 2^-126 may count as zero
  bool weights_in_bfloat16 = false;  // int8 weights times their scales are rounded to it first
};

// A row of activations after that rounding.
std::vector<double> rounded_activations(std::span<const float> row, Activations activations);

// Most roundings that a term of the sum goes through.
double linear_roundings(const WeightMatrix& w, const LinearModel& model);
double rms_norm_roundings(std::int64_t dim);
// Of gate / (1 + exp(-gate)) * up, relative.
double swiglu_relative_error(double gate);

// before: y [rows, w.rows] as it was, where the product is added to it; else empty.
BoundedValues reference_linear(const WeightMatrix& w, std::span<const float> x, std::span<const float> before,
                               const LinearModel& model);
BoundedValues reference_embed(const WeightMatrix& table, std::span<const std::int32_t> tokens);
BoundedValues reference_rms_norm(std::span<const float> x, std::span<const float> weight, float eps);
BoundedValues reference_swiglu(std::span<const float> gate_up, std::int64_t dim);
BoundedValues reference_rope(std::span<const float> x, std::int64_t heads, std::span<const std::int64_t> positions,
                             std::span<const double> frequencies);

}  // namespace treeattn::kernels
