// SPDX-License-Identifier: Apache-2.0
// What the error bound has to know of the GPU's kernels (docs/exactness.md).
#pragma once

#include <string_view>

#include "kernels/reference/reference.h"

namespace treeattn::kernels::cuda {

inline ErrorModel error_model(std::string_view kernel, const Problem& problem) {
  ErrorModel model;
  if (kernel == "mma") {
    // Tensor cores add products of one instruction after aligning them, cutting off what falls below the largest: an
    // error of at most 2^-23 of the largest term a product, against 2^-24 of the sum for a rounded addition.
    model.unit_roundoff = 0x1p-22;
    model.weight_error = 0x1p-16;  // two bfloat16 limbs hold 16 bits of a weight, two of float16 more
    // What is below half the smallest float16, of weights times 2^14, is lost.
    if (problem.v.dtype == DType::kFloat16) model.weight_floor = 0x1p-39;
  }
  return model;
}

}  // namespace treeattn::kernels::cuda
