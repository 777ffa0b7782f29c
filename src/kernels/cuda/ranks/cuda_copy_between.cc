// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include <algorithm>

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

// On a stream of this thread, which waits for no other one.
void copy_on(int gpu, void* to, const void* from, std::size_t bytes) {
  const UseDevice use(gpu);
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, cudaStreamPerThread), "copy of a message");
  check(cudaStreamSynchronize(cudaStreamPerThread), "copy of a message");
}

}  // namespace

void copy_between(void* to, const void* from, std::size_t bytes) {
  const int source = gpu_of(from), target = gpu_of(to);
  if (source == target || source == kNone || target == kNone) {
    return copy_on(std::max(source, target), to, from, bytes);
  }
  // By way of the host: pages are mapped for their own GPU alone (cuda_device_array.cc).
  constexpr std::size_t kPart = std::size_t{4} << 20;
  thread_local PinnedBuffer part;
  if (part.bytes() == 0) part.resize(kPart);
  for (std::size_t done = 0; done < bytes; done += kPart) {
    const std::size_t now = std::min(kPart, bytes - done);
    copy_on(source, part.data(), static_cast<const std::byte*>(from) + done, now);
    copy_on(target, static_cast<std::byte*>(to) + done, part.data(), now);
  }
}

}  // namespace treeattn::kernels::cuda
