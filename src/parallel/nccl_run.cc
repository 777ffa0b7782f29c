// SPDX-License-Identifier: Apache-2.0
#include "parallel/nccl_run.h"

#include "treeattn/error.h"

namespace treeattn::parallel {

float* NcclRun::merged(float* own) {
  const std::size_t blocks = context.shares.nodes_of(rank()).size();
  if (blocks == 0) {
    own = scratch.take(shape.floats());
    kernels::cuda::clear_rows(own, shape, stream);
    return own;
  }
  std::vector<kernels::cuda::MergeStep> steps;
  for (std::size_t i = 1; i < blocks; ++i) steps.push_back({own, own + i * shape.floats()});
  kernels::cuda::merge_blocks(steps, shape, stream);
  return own;
}

float* NcclRun::root(DeviceNodes& nodes) {
  if (nodes.nodes().size() != 1) throw Error("internal: a reduction ended with more than its root");
  return nodes.blocks().front();
}

void NcclRun::copy(float* to, const float* from, std::size_t floats) const {
  kernels::cuda::copy_floats(to, from, floats, stream);
}

}  // namespace treeattn::parallel
