// SPDX-License-Identifier: Apache-2.0
// The kernel for everything that has none of its own.
#include <algorithm>

#include "kernels/cuda/generic_node.cuh"
#include "kernels/cuda/launch.h"

namespace treeattn::kernels::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) generic_kernel(const __grid_constant__ AttentionParams p) {
  extern __shared__ float memory[];
  const WorkItem item = p.items[blockIdx.x];
  const int rows = item.rows();
  const GenericScratch scratch(memory, rows, p.k.dim);
  generic_node(p, item, scratch);
  const int floats = rows * row_state_floats(p.v.dim);
  float* to = states_of_item(p, item);
  for (int i = threadIdx.x; i < floats; i += blockDim.x) to[i] = scratch.stack[i];
  __syncthreads();
  finish_item(p, item);
}

}  // namespace

Launch find_generic(const AttentionParams& params, int most_rows, std::size_t most_bytes) {
  return with_rows_that_fit(std::min(most_rows, kGenericRows), most_bytes, [&](int rows) -> Launch {
    const std::size_t floats = GenericScratch::floats(rows, params.k.dim, params.v.dim);
    return {generic_kernel, kThreads, floats * sizeof(float), "generic", {kGenericRows, kGenericLevels}, 0};
  });
}

}  // namespace treeattn::kernels::cuda
