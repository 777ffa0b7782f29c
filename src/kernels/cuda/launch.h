// SPDX-License-Identifier: Apache-2.0
// The kernels, as the host calls them.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/params.h"

namespace treeattn::kernels::cuda {

// Throws Unavailable naming what failed.
void check(cudaError_t error, const char* what);

// A kernel and how it is started: one block an item.
struct Launch {
  void (*kernel)(AttentionParams) = nullptr;
  int threads = 0;
  std::size_t shared_bytes = 0;
  const char* name = "";
  ItemLimits limits;
  int tile = 0;   // keys of a piece, where tensor copies can bring them
  int slots = 0;  // blocks that run at the same time
};

// Parts of find_decode_mma.
Launch find_decode_bf16(int dim, int rows);
Launch find_decode_f16(int dim, int rows);

// The kernel for calls of this kind, whose items never need more than `rows` rows; it may ask for less. kernel is null
// where there is none.
Launch find_decode_mma(const AttentionParams& params, int rows);
Launch find_generic(const AttentionParams& params, int rows);

}  // namespace treeattn::kernels::cuda
