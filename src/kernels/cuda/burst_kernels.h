// SPDX-License-Identifier: Apache-2.0
// Multiply-adds and nothing else: how fast a GPU calculates at best.
#pragma once

#include <cuda_runtime.h>

#include "treeattn/dtype.h"

namespace treeattn::kernels::cuda {

// About a millisecond of them. float32: plain ones; the other types: on tensor cores, those of bytes as bfloat16, which
// they become. Returns the operations, two for a multiply-add.
double multiply_add_burst(DType type, int multiprocessors, float* sink, cudaStream_t stream);

}  // namespace treeattn::kernels::cuda
