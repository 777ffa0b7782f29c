// SPDX-License-Identifier: Apache-2.0
// How many bfloat16 limbs a query needs. Static, as it is used in files that are compiled with flags of their own
// (unroll.h).
#pragma once

#include "treeattn/dtype.h"

namespace treeattn::kernels {

// A query row that was float16 or float32 needs 2 or 3 for their sum to be exact.
static inline int bfloat16_limbs_of(DType q_dtype) {
  return q_dtype == DType::kBFloat16 ? 1 : q_dtype == DType::kFloat16 ? 2 : 3;
}

}  // namespace treeattn::kernels
