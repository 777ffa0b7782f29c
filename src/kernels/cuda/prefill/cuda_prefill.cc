// SPDX-License-Identifier: Apache-2.0
// Which calls the prefill kernel serves.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/launch.h"

namespace treeattn::kernels::cuda {
namespace {

constexpr int kFewestQueries = 64;  // of these a block of 128 rows is half full

// The kernel is compiled for this very architecture and no later one.
bool gpu_is_hopper() {
  int gpu = 0, major = 0, minor = 0;
  return cudaGetDevice(&gpu) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, gpu) == cudaSuccess &&
         cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, gpu) == cudaSuccess && major == 9 &&
         minor == 0;
}

}  // namespace

Launch find_prefill(const AttentionParams& p) {
  const int dim = std::max(p.k.dim, p.v.dim);
  const bool q_aligned = reinterpret_cast<std::uintptr_t>(p.q) % 16 == 0 && p.q_batch_stride % 8 == 0 &&
                         p.q_query_stride % 8 == 0 && p.q_head_stride % 8 == 0;
  const bool plain = p.softcap == 0 && p.alibi_slopes == nullptr && p.scale > 0;
  if (p.queries < kFewestQueries || p.k.dtype != p.v.dtype || !q_aligned || !plain || !has_short_positions(p) ||
      !gpu_is_hopper())
    return {};
  if (p.q_dtype == DType::kFloat16) return p.k.dtype == DType::kFloat16 ? find_prefill_f16(dim) : Launch{};
  if (p.q_dtype != DType::kBFloat16) return {};
  switch (p.k.dtype) {
    case DType::kBFloat16:
      return find_prefill_bf16(dim);
    case DType::kInt8:
      return find_prefill_int8(dim);
    case DType::kFp8E4M3:
      return find_prefill_fp8(dim);
    default:
      return {};
  }
}

}  // namespace treeattn::kernels::cuda
