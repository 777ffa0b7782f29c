// SPDX-License-Identifier: Apache-2.0
// What the benchmarks on a GPU share.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#include "base/timing.h"

namespace treeattn::bench {

inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

// Small bfloat16 numbers.
static __global__ void fill_kernel(unsigned short* data, std::size_t count, unsigned seed) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < count;
       i += std::size_t{gridDim.x} * blockDim.x) {
    unsigned x = static_cast<unsigned>(i) * 2654435761u + seed;
    x ^= x >> 15;
    x *= 2246822519u;
    x ^= x >> 13;
    data[i] = static_cast<unsigned short>(((x & 1) << 15) | ((120 + (x >> 1) % 8) << 7) | ((x >> 8) & 127));
  }
}

// A plain read: 16-byte loads, four of a thread on their way.
static __global__ void read_kernel(const uint4* data, std::size_t count, unsigned* out) {
  unsigned sum = 0;
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x;
  for (; i + 3 * stride < count; i += 4 * stride) {
    const uint4 a = data[i], b = data[i + stride], c = data[i + 2 * stride], d = data[i + 3 * stride];
    sum += a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
  }
  for (; i < count; i += stride) sum += data[i].x ^ data[i].y ^ data[i].z ^ data[i].w;
  if (sum == 0x12345678u) *out = sum;
}

// Of single calls on a stream, after three that do not count.
template <class Call>
double median_ms(int repeats, const Call& call, cudaStream_t stream = nullptr) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  std::vector<double> times;
  for (int i = 0; i < repeats + 3; ++i) {
    check(cudaEventRecord(begin, stream), "record");
    call(i);
    check(cudaEventRecord(end, stream), "record");
    check(cudaEventSynchronize(end), "synchronize");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "time");
    if (i >= 3) times.push_back(ms);
  }
  return base::median(std::move(times));
}

}  // namespace treeattn::bench
