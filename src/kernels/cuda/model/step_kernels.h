// SPDX-License-Identifier: Apache-2.0
// The new token of every sequence of a decode step, on its way into attention.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/params.h"

namespace treeattn::kernels::cuda {

struct StepRows {
  const float* q = nullptr;       // [rows, heads, dim]
  const float* k = nullptr;       // [rows, kv_heads, dim]
  const float* v = nullptr;       // the same
  const float* angles = nullptr;  // [rows, 2, dim / 2]
  void* turned_q = nullptr;       // where q goes, in the type of the cache
};

// Turns q and k, and puts k and v where the page tables of `params` have the last token of each sequence. K and V of
// one type (float32, float16, bfloat16) and head dim. overlaps: as in start_dependent.
void store_step(const AttentionParams& params, const StepRows& rows, bool overlaps, cudaStream_t stream);

}  // namespace treeattn::kernels::cuda
