// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include <algorithm>
#include <vector>

#include "kernels/cuda/device_buffer.h"
#include "kernels/cuda/pinned_buffer.h"
#include "kernels/cuda/ranks/rank_device.h"

namespace treeattn::kernels::cuda {
namespace {

constexpr int kNone = -1;

// The GPU whose memory it is, or kNone: the host's.
int gpu_of(const void* address) {
  cudaPointerAttributes attributes{};
  check(cudaPointerGetAttributes(&attributes, address), "where memory lies");
  return attributes.type == cudaMemoryTypeDevice ? attributes.device : kNone;
}

// GPUs on which this thread has copies under way, on a stream of its own that waits for no other one.
thread_local std::vector<int> under_way;

}  // namespace

void start_copy_on(int gpu, void* to, const void* from, std::size_t bytes) {
  const UseDevice use(gpu);
  if (std::ranges::find(under_way, gpu) == under_way.end()) under_way.push_back(gpu);
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, cudaStreamPerThread), "copy of a message");
}

void start_copy(void* to, const void* from, std::size_t bytes) {
  const int source = gpu_of(from), target = gpu_of(to);
  if (source == target || source == kNone || target == kNone)
    return start_copy_on(std::max(source, target), to, from, bytes);
  // By way of the host: pages are mapped for their own GPU alone (cuda_device_array.cc).
  constexpr std::size_t kPart = std::size_t{4} << 20;
  thread_local PinnedBuffer part;
  if (part.bytes() == 0) part.resize(kPart);
  for (std::size_t done = 0; done < bytes; done += kPart) {
    const std::size_t now = std::min(kPart, bytes - done);
    start_copy_on(source, part.data(), static_cast<const std::byte*>(from) + done, now);
    finish_copies();
    start_copy_on(target, static_cast<std::byte*>(to) + done, part.data(), now);
    finish_copies();
  }
}

void finish_copies() {
  for (; !under_way.empty(); under_way.pop_back()) {
    const UseDevice use(under_way.back());
    check(cudaStreamSynchronize(cudaStreamPerThread), "copies of messages");
  }
}

}  // namespace treeattn::kernels::cuda
