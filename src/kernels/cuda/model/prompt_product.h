// SPDX-License-Identifier: Apache-2.0
// Which linear maps of a prompt are products of matrices, all rows at once, by cuBLASLt.
#pragma once

#include <cstdint>

#include "kernels/model_ops.h"

namespace treeattn::kernels::cuda {

// Of weights that can be streamed, too. int8 weights are unpacked for it, which takes 512 MiB at most: only matrices of
// logits have more, whose rows are few.
constexpr bool is_product(DType weights, Pass pass, std::int64_t outputs, std::int64_t inputs) {
  constexpr std::int64_t kMostUnpacked = 1 << 28;
  if (pass != Pass::kPrefill || outputs % 8 != 0) return false;
  return weights == DType::kBFloat16 || outputs * inputs <= kMostUnpacked;
}

}  // namespace treeattn::kernels::cuda
