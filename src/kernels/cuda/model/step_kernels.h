// SPDX-License-Identifier: Apache-2.0
// The new token of every sequence of a decode step, on its way into attention.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/step_target.h"

namespace treeattn::kernels::cuda {

struct StepRows {
  const float* q = nullptr;  // [rows, heads, dim]
  const float* k = nullptr;  // [rows, kv_heads, dim]
  const float* v = nullptr;  // the same
};

// Turns q and k, and puts k and v where the page tables have the last token of each sequence. overlaps: as in
// start_dependent.
void store_step(const StepTarget& target, const StepRows& rows, bool overlaps, cudaStream_t stream);

}  // namespace treeattn::kernels::cuda
