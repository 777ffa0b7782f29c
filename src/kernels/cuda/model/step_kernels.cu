// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/dependent_launch.cuh"
#include "kernels/cuda/model/step_kernels.h"
#include "kernels/cuda/model/step_rows.cuh"
#include "kernels/cuda/ranks/warp_rows.cuh"

namespace treeattn::kernels::cuda {
namespace {

constexpr int kWarps = 4;

// A warp to a head: those of q, then of k, then of v.
__global__ void store_step_kernel(const __grid_constant__ StepTarget t, StepRows rows, int count) {
  let_next_start();
  wait_for_earlier();
  const int warp = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / kLanes);
  if (warp >= count) return;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int all = t.heads + 2 * t.kv_heads, row = warp / all, dim = t.k.dim;
  int head = warp % all, part = kStepQuery;
  const float* from = rows.q + (std::int64_t{row} * t.heads + head) * dim;
  if (head >= t.heads) {
    head -= t.heads;
    part = head < t.kv_heads ? kStepKey : kStepValue;
    head %= t.kv_heads;
    from = (part == kStepKey ? rows.k : rows.v) + (std::int64_t{row} * t.kv_heads + head) * dim;
  }
  std::byte* to = step_row(t, part, row, head);
  for (int i = lane; i < dim / 2; i += kLanes) {
    store_pair(t, part, to, i, {from[i], from[i + dim / 2]}, step_angle(t, part, row, i));
  }
}

}  // namespace

void store_step(const StepTarget& target, const StepRows& rows, bool overlaps, cudaStream_t stream) {
  const int warps = target.rows * (target.heads + 2 * target.kv_heads);
  if (warps == 0) return;
  start_dependent(store_step_kernel, static_cast<unsigned>((warps + kWarps - 1) / kWarps), kWarps * kLanes, overlaps,
                  stream, "new keys", target, rows, warps);
}

}  // namespace treeattn::kernels::cuda
