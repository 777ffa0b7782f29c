// SPDX-License-Identifier: Apache-2.0
// What the error bound has to know of the GPU's kernels (docs/exactness.md).
#pragma once

#include <cstdint>
#include <string_view>

#include "kernels/cuda/model/prompt_product.h"
#include "kernels/head_dims.h"
#include "kernels/limb_range.h"
#include "kernels/reference/model_reference.h"
#include "kernels/reference/reference.h"

namespace treeattn::kernels::cuda {

// Tensor cores take a subnormal float16 as it is, with the exponent of the smallest normal one, and align products by
// the exponents of their factors: what is cut off is that of a product with the smallest normal number. Of a value,
// 2^-23 of that for each limb of a weight.
inline constexpr double kLeastHalf = 0x1p-14;
inline constexpr double kCutOfSubnormals = 2 * 0x1p-23 * kLeastHalf;

inline ErrorModel error_model(std::string_view kernel, const Problem& problem) {
  ErrorModel model;
  if (kernel == "mma") {
    // Tensor cores add products of one instruction after aligning them, cutting off what falls below the largest: an
    // error of at most 2^-23 of the largest term a product, against 2^-24 of the sum for a rounded addition.
    model.unit_roundoff = 0x1p-22;
    model.weight_error = 0x1p-16;  // two bfloat16 limbs hold 16 bits of a weight, two of float16 more
    // What is below half the smallest float16, of weights times 2^14, is lost.
    if (problem.v.dtype == DType::kFloat16) model.weight_floor = 0x1p-39;
    if (problem.v.dtype == DType::kFloat16) model.product_floor = kCutOfSubnormals;
    if (problem.k.dtype == DType::kFloat16) model.least_factor = kLeastHalf;
    // q of another type: three limbs hold a float32, those of float16 but for what is below half the smallest float16
    // of a row scaled to 2^14.
    if (problem.k.dtype == DType::kFloat16 && problem.q.dtype != DType::kFloat16) model.query_error = 0x1p-39;
  }
  if (kernel == "mma8") {
    model.unit_roundoff = 0x1p-22;  // as above
    // q with fp8: two float16 limbs of a row scaled to 2^14, or one where it holds the element; what is below half the
    // smallest float16 is lost. With int8: the same, or fixed point with the largest at 2^21.
    const bool exact = problem.q.dtype != DType::kFloat32 && problem.k.dtype == DType::kFp8E4M3;
    model.query_error = exact ? 0x1p-39 : 0x1p-22;
    // Weights with their value scales: exp2 and two float16 limbs cost 2^-22 each; the largest is at least 1 in the
    // unit they are kept in.
    model.weight_error = 0x1p-21;
    model.weight_floor = 0x1p-25;
  }
  if (kernel == "mma32") {
    model.unit_roundoff = 0x1p-22;  // as above
    // Two limbs of 11 bits hold a number to 2^-22, and the product of the lower ones, left out, is 2^-22 of the whole:
    // three times that for a product, in a logit or in an average, there beside exp2's.
    model.query_error = 0x1.9p-21;
    model.weight_error = 0x1.1p-20;
    model.tile_tokens = 32;  // four warps by 8 keys
    // The columns of a key, of which each may lose 2^-126, times what q and the scale are together at most.
    model.logit_floor = static_cast<double>(kMostHeadDim) * 0x1p-126 * kMostWithLimbs;
  }
  if (kernel == "prefill") {
    model.unit_roundoff = 0x1p-22;
    // A weight is one number of 8 bits, or of 11, and exp2's error comes with it. Of 8-bit K and V that number, of 8
    // bits, is the weight with its value's scale; the elements are exact, and so is q, which is bfloat16.
    const bool half = problem.v.dtype == DType::kFloat16;
    model.weight_error = (half ? 0x1p-11 : 0x1p-8) + 0x1p-21;
    if (half) {
      model.weight_floor = 0x1p-39;
      model.product_floor = kCutOfSubnormals;
      model.least_factor = kLeastHalf;
    }
  }
  return model;
}

// The same of linear maps (model_ops.h).
inline LinearModel linear_model(DType weights, Pass pass, std::int64_t outputs, std::int64_t inputs) {
  LinearModel model;
  if (weights == DType::kBFloat16 || weights == DType::kInt8) {
    model.activations = Activations::kBFloat16;
    model.unit_roundoff = 0x1p-22;
    model.flushes_subnormals = true;  // what tensor cores do with them is not documented
    model.weights_in_bfloat16 = weights == DType::kInt8 && is_product(weights, pass, outputs, inputs);
  }
  return model;
}

}  // namespace treeattn::kernels::cuda
