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
};

// The kernel for calls of this kind: items of at most `rows` rows and `leaves` leaves. kernel is null where there is
// none.
Launch find_decode_mma(const AttentionParams& params, int rows, int leaves);
Launch find_generic(const AttentionParams& params, int rows);

}  // namespace treeattn::kernels::cuda
