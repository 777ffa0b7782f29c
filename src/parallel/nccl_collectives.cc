// SPDX-License-Identifier: Apache-2.0
// The strategies that are collectives of NCCL.
#include <algorithm>

#include "parallel/nccl_run.h"

namespace treeattn::parallel {
namespace {

void allreduce(NcclRun& run, float* data, std::size_t count, ncclRedOp_t operation) {
  run.start("ncclAllReduce", [&] {
    run.nccl.begun(ncclAllReduce(data, data, count, ncclFloat, operation, run.nccl.get(), run.stream), "ncclAllReduce");
  });
  run.context.communicator.count_step();
}

}  // namespace

float* nccl_two_phases(NcclRun& run, float* own) {
  const std::size_t rest = run.shape.floats() - run.shape.rows;
  run.scratch.begin(2 * run.shape.floats());
  own = run.merged(own);
  float* top = run.scratch.take(run.shape.rows);
  float* sums = run.scratch.take(rest);
  kernels::cuda::take_maxima(own, run.shape, top, run.stream);
  allreduce(run, top, run.shape.rows, ncclMax);
  kernels::cuda::weigh_sums(own, top, run.shape, sums, run.stream);
  allreduce(run, sums, rest, ncclSum);
  kernels::cuda::join_sums(top, sums, run.shape, own, run.stream);
  return own;
}

float* nccl_as_in_paper(NcclRun& run, float* own) {
  const std::size_t values = run.shape.floats() - 2 * run.shape.rows;
  run.scratch.begin(3 * run.shape.floats());
  own = run.merged(own);
  float* lse = run.scratch.take(run.shape.rows);
  float* top = run.scratch.take(run.shape.rows);
  float* weight = run.scratch.take(run.shape.rows);
  float* o = run.scratch.take(values);
  kernels::cuda::normalise(own, run.shape, lse, o, run.stream);
  run.copy(top, lse, run.shape.rows);
  allreduce(run, top, run.shape.rows, ncclMax);
  kernels::cuda::weigh_normalised(lse, top, run.shape, o, weight, run.stream);
  allreduce(run, o, values, ncclSum);
  allreduce(run, weight, run.shape.rows, ncclSum);
  kernels::cuda::join_normalised(top, weight, o, run.shape, own, run.stream);
  return own;
}

// Everybody's blocks, padded to those of the rank that has most.
float* nccl_gather(NcclRun& run, float* own) {
  const auto ranks = static_cast<std::size_t>(run.size());
  std::size_t most = 1;
  for (int r = 0; r < run.size(); ++r) most = std::max(most, run.context.part(r, r).size());
  const std::size_t floats = most * run.shape.floats();
  run.scratch.begin((ranks + 2) * floats);
  if (!run.context.canonical) own = run.merged(own);
  float* mine = run.scratch.take(floats);
  float* all = run.scratch.take(ranks * floats);
  run.copy(mine, own, run.context.part(run.rank(), run.rank()).size() * run.shape.floats());
  run.start("ncclAllGather", [&] {
    run.nccl.begun(ncclAllGather(mine, all, floats, ncclFloat, run.nccl.get(), run.stream), "ncclAllGather");
  });
  DeviceNodes nodes(run.shape, run.stream);
  for (int r = 0; r < run.size(); ++r) nodes.add(run.context.part(r, r), all + static_cast<std::size_t>(r) * floats);
  if (!run.context.canonical) nodes.merge_all();
  return run.root(nodes);
}

}  // namespace treeattn::parallel
