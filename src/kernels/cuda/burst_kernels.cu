// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/burst_kernels.h"
#include "kernels/cuda/dependent_launch.cuh"
#include "kernels/cuda/mma.cuh"

namespace treeattn::kernels::cuda {
namespace {

constexpr int kThreads = 256, kBlocksPerMultiprocessor = 2;
constexpr int kRounds = 8192;
constexpr int kSums = 8;  // independent ones, so that none waits for itself

__device__ void keep(float sum, float* sink) {
  if (sum == 1.2345e30f) *sink = sum;  // never, but the compiler cannot know
}

template <class T>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor) tensor_burst(float* sink) {
  float sums[kSums][4] = {};
  const std::uint32_t one = pack<T>(static_cast<float>(threadIdx.x), 1.0f);
  const std::uint32_t a[4] = {one, one ^ 1u, one ^ 2u, one ^ 3u};
  for (int i = 0; i < kRounds; ++i) {
#pragma unroll
    for (int s = 0; s < kSums; ++s) multiply_add<T>(sums[s], a, one, one);
  }
  for (int s = 0; s < kSums; ++s) keep(sums[s][0] + sums[s][1] + sums[s][2] + sums[s][3], sink);
}

__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor) float_burst(float* sink) {
  float sums[kSums] = {};
  const float a = static_cast<float>(threadIdx.x), b = 1.0f / (1.0f + a);
  for (int i = 0; i < kRounds; ++i) {
#pragma unroll
    for (int s = 0; s < kSums; ++s) sums[s] = fmaf(sums[s], b, a);
  }
  for (int s = 0; s < kSums; ++s) keep(sums[s], sink);
}

}  // namespace

double multiply_add_burst(DType type, int multiprocessors, float* sink, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>(multiprocessors * kBlocksPerMultiprocessor);
  const double rounds = static_cast<double>(blocks) * kThreads * kRounds * kSums;  // of one thread each
  double operations = 2;
  auto* kernel = float_burst;
  if (type != DType::kFloat32) {
    kernel = type == DType::kFloat16 ? tensor_burst<__half> : tensor_burst<__nv_bfloat16>;
    operations = 2.0 * 16 * 8 * 16 / 32;  // of a warp's instruction, over its threads
  }
  start_dependent(kernel, blocks, kThreads, false, stream, "multiply-adds", sink);
  return operations * rounds;
}

}  // namespace treeattn::kernels::cuda
