// SPDX-License-Identifier: Apache-2.0
// Functions of the CUDA driver, found through the runtime: nothing links to the driver, as a program must start where
// there is none.
#pragma once

#include <cuda_runtime.h>

namespace treeattn::kernels::cuda {

// As CUDA 12.0 has it; null where the driver has none.
inline void* driver_entry(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
#else
  const cudaError_t error = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
  if (error == cudaSuccess && result == cudaDriverEntryPointSuccess) return found;
  cudaGetLastError();
  return nullptr;
}

}  // namespace treeattn::kernels::cuda
