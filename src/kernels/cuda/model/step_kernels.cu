// SPDX-License-Identifier: Apache-2.0
#include "base/half.h"
#include "kernels/cuda/dependent_launch.cuh"
#include "kernels/cuda/device_rows.cuh"
#include "kernels/cuda/model/rope.cuh"
#include "kernels/cuda/model/step_kernels.h"
#include "kernels/cuda/ranks/warp_rows.cuh"

namespace treeattn::kernels::cuda {
namespace {

constexpr int kWarps = 4;

// Where the row goes: all that a warp needs to know of the call.
struct StepTask {
  StepRows rows;
  DeviceKv k, v;
  const std::int64_t* lengths = nullptr;
  int heads = 0, kv_heads = 0, half = 0;
  int count = 0;  // warps with work
};

// The same rounding as in row_kernels.cu.
__device__ void store(std::byte* row, int i, DType type, float value) {
  if (type == DType::kFloat32) {
    reinterpret_cast<float*>(row)[i] = value;
  } else if (type == DType::kFloat16) {
    reinterpret_cast<std::uint16_t*>(row)[i] = base::float_to_float16(value);
  } else {
    reinterpret_cast<std::uint16_t*>(row)[i] = base::float_to_bfloat16(value);
  }
}

// A warp to a head: those of q, then of k, then of v.
__global__ void store_step_kernel(const __grid_constant__ StepTask t) {
  let_next_start();
  wait_for_earlier();
  const int warp = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / kLanes);
  if (warp >= t.count) return;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int all = t.heads + 2 * t.kv_heads, row = warp / all, dim = 2 * t.half;
  int head = warp % all;
  const bool is_q = head < t.heads, is_v = head >= t.heads + t.kv_heads;
  const float* from;
  std::byte* to;
  if (is_q) {
    from = t.rows.q + (row * t.heads + head) * dim;
    to = static_cast<std::byte*>(t.rows.turned_q) + (row * t.heads + head) * dim * element_size(t.k.dtype);
  } else {
    head -= is_v ? t.heads + t.kv_heads : t.heads;
    from = (is_v ? t.rows.v : t.rows.k) + (row * t.kv_heads + head) * dim;
    to = const_cast<std::byte*>(kv_row(is_v ? t.v : t.k, row, t.lengths[row] - 1, head));
  }
  const float* cosine = t.rows.angles + row * dim;
  for (int i = lane; i < t.half; i += kLanes) {
    TurnedPair pair{from[i], from[i + t.half]};
    if (!is_v) pair = turned(pair.first, pair.second, cosine[i], cosine[i + t.half]);
    store(to, i, t.k.dtype, pair.first);
    store(to, i + t.half, t.k.dtype, pair.second);
  }
}

}  // namespace

void store_step(const AttentionParams& params, const StepRows& rows, bool overlaps, cudaStream_t stream) {
  StepTask task;
  task.rows = rows;
  task.k = params.k;
  task.v = params.v;
  task.lengths = params.lengths;
  task.heads = params.heads;
  task.kv_heads = params.kv_heads;
  task.half = params.k.dim / 2;
  task.count = static_cast<int>(params.rows / params.heads) * (params.heads + 2 * params.kv_heads);
  if (task.count == 0) return;
  start_dependent(store_step_kernel, static_cast<unsigned>((task.count + kWarps - 1) / kWarps), kWarps * kLanes,
                  overlaps, stream, "new keys", task);
}

}  // namespace treeattn::kernels::cuda
