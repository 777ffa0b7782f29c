// SPDX-License-Identifier: Apache-2.0
// The kernels, as the host calls them.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "kernels/cuda/params.h"

namespace treeattn::kernels::cuda {

// Throws Unavailable naming what failed.
void check(cudaError_t error, const char* what);

// Of the current GPU: of a block (cudaDevAttrMaxSharedMemoryPerBlockOptin) or of a multiprocessor.
int shared_memory(cudaDeviceAttr of);

// Whether what runs on the current GPU was compiled for Hopper or later: tensor copies, kernels that wait for those
// before them. The GPU alone does not say so: it translates code for an older one, too.
bool code_is_for_hopper();

// A kernel and how it is started: one block an item, or as many blocks as run at the same time, which take items until
// none is left.
struct Launch {
  void (*kernel)(AttentionParams) = nullptr;
  int threads = 0;
  std::size_t shared_bytes = 0;
  const char* name = "";
  ItemLimits limits;
  int tile = 0;              // keys of a piece, where tensor copies can bring them
  bool whole_lines = false;  // and every row of these has 128 bytes to itself, or more
  int slots = 0;             // blocks that run at the same time
  int ring_bytes = 0;        // of K and V that a block has on their way
  int ring_tokens = 0;       // and keys; 0: unknown
  int busy = 0;              // blocks that are enough to keep the memory busy
  bool takes_items = false;
  // Started afterwards: computes rows again that came out not finite.
  void (*redo)(AttentionParams) = nullptr;
  std::size_t redo_bytes = 0;  // of shared memory
  bool waits = false;          // the kernel calls wait_for_earlier (dependent_launch.cuh)
};

inline constexpr int kRedoThreads = 256;

// Parts of find_prefill.
Launch find_prefill_bf16(int dim);
Launch find_prefill_f16(int dim);
// K and V 8-bit, q bfloat16.
Launch find_prefill_int8(int dim);
Launch find_prefill_fp8(int dim);
// Adds what computes bad rows again. levels: of the largest node.
void add_redo(const AttentionParams& params, int levels, Launch& launch);

// find(columns of the decode kernels that serve a head dim, as a constant).
template <class Find>
Launch for_head_dim(int dim, const Find& find) {
  switch (kernel_columns(dim)) {
    case 64:
      return find(std::integral_constant<int, 64>());
    case 80:
      return find(std::integral_constant<int, 80>());
    case 96:
      return find(std::integral_constant<int, 96>());
    case 128:
      return find(std::integral_constant<int, 128>());
    case 256:
      return find(std::integral_constant<int, 256>());
    default:
      return {};
  }
}

// Parts of find_decode_mma. most_bytes: of shared memory, to choose by; what is found may need more.
Launch find_decode_bf16(int dim, int rows, std::size_t most_bytes);
Launch find_decode_f16(int dim, int rows, std::size_t most_bytes);
Launch find_decode_f32(int dim, int rows, std::size_t most_bytes);
// q of another type than K and V.
Launch find_decode_bf16_limbs(int dim, int rows);
Launch find_decode_f16_limbs(int dim, int rows);
// two_heads: items of two neighbouring KV heads, of 64 columns each that lie side by side; `rows` is of both.
Launch find_decode_int8(int dim, int rows, bool two_heads);
Launch find_decode_fp8(int dim, int rows, bool two_heads);

// Whether positions and pages are 32-bit numbers, as the tensor-core kernels have them.
bool has_short_positions(const AttentionParams& params);

// The kernel for calls with many queries, on the current GPU; kernel is null where there is none. It needs tensor maps.
Launch find_prefill(const AttentionParams& params);

// The kernel for calls of this kind, whose items never need more than `rows` rows; it may ask for less. kernel is null
// where there is none that does with most_bytes of shared memory for a block.
Launch find_decode_mma(const AttentionParams& params, int rows, std::size_t most_bytes);
Launch find_generic(const AttentionParams& params, int rows, std::size_t most_bytes);

// find(rows) with as many rows of an item as fit into shared memory: how many they are changes no bits.
template <class Find>
Launch with_rows_that_fit(int rows, std::size_t most_bytes, const Find& find) {
  for (; rows > 0; rows /= 2) {
    Launch launch = find(rows);
    if (launch.kernel == nullptr || launch.shared_bytes > most_bytes) continue;
    launch.limits.rows = std::min(launch.limits.rows, rows * launch.limits.kv_heads);
    return launch;
  }
  return {};
}

}  // namespace treeattn::kernels::cuda
