// SPDX-License-Identifier: Apache-2.0
// Multiply-adds and nothing else: how fast a GPU calculates at best.
#pragma once

#include <cuda_runtime.h>

#include "treeattn/dtype.h"

namespace treeattn::kernels::cuda {

// About a millisecond of them. float16 and bfloat16: on tensor cores; else float32. Returns the operations, two for a
// multiply-add.
double multiply_add_burst(DType type, int multiprocessors, float* sink, cudaStream_t stream);

}  // namespace treeattn::kernels::cuda
