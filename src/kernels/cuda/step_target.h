// SPDX-License-Identifier: Apache-2.0
// Where the new token of every sequence of a decode step goes on its way into attention. Needs no CUDA.
#pragma once

#include <cstdint>

#include "kernels/cuda/params.h"

namespace treeattn::kernels::cuda {

// K and V of one type (float32, float16, bfloat16) and head dim.
struct StepTarget {
  DeviceKv k, v;
  const std::int64_t* lengths = nullptr;  // [rows], the new token counted
  const float* angles = nullptr;          // [rows, 2, dim / 2] cosines, then sines
  void* turned_q = nullptr;               // [rows, heads, dim], in the type of the cache
  int rows = 0, heads = 0, kv_heads = 0;
};

}  // namespace treeattn::kernels::cuda
