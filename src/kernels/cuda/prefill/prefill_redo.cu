// SPDX-License-Identifier: Apache-2.0
// Rows of a prefill that came out not finite, or without any weight, once more by plain arithmetic: a rounded weight
// times infinity, or a hidden NaN times zero, is not what it stands for.
#include "kernels/cuda/generic_node.cuh"
#include "kernels/cuda/launch.h"

namespace treeattn::kernels::cuda {
namespace {

constexpr int kRows = 8;  // at a time

__global__ void __launch_bounds__(kRedoThreads) redo_kernel(const __grid_constant__ AttentionParams p) {
  extern __shared__ float memory[];
  __shared__ unsigned bad[kRedoThreads];
  // Rows that lie together go to different blocks.
  const int words = p.item_count * (kPrefillRows / kRows);
  const int mine = static_cast<int>(threadIdx.x * gridDim.x + blockIdx.x);
  bad[threadIdx.x] = mine < words ? p.bad_rows[mine] : 0;
  if (!__syncthreads_or(bad[threadIdx.x] != 0)) return;
  const int row_floats = row_state_floats(p.v.dim), units = p.v.dim / 4;
  for (int i = 0; i < kRedoThreads; ++i) {
    if (bad[i] == 0) continue;
    const int word = static_cast<int>(i * gridDim.x + blockIdx.x);
    WorkItem item = p.items[word / (kPrefillRows / kRows)];
    const int first = word % (kPrefillRows / kRows) * kRows;
    item.query0 += first;
    item.queries = min(kRows, item.queries - first);
    const GenericScratch scratch(memory, item.queries, p.k.dim);
    __syncthreads();
    generic_node(p, item, scratch);
    __syncthreads();
    for (int j = threadIdx.x; j < item.queries * units; j += blockDim.x) {
      const int row = j / units, column = j % units * 4;
      if ((bad[i] >> (4 * row) & 1) == 0) continue;
      const float* state = scratch.stack + row * row_floats;
      const float4 o = make_float4(state[column], state[column + 1], state[column + 2], state[column + 3]);
      store_result(p, item.node, global_row(p, item, row), column, state[p.v.dim], state[p.v.dim + 1], o);
    }
  }
}

}  // namespace

void add_redo(const AttentionParams& params, int levels, Launch& launch) {
  launch.redo = redo_kernel;
  launch.redo_bytes = GenericScratch::floats(kRows, params.k.dim, params.v.dim, levels) * sizeof(float);
}

}  // namespace treeattn::kernels::cuda
