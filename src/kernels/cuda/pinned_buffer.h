// SPDX-License-Identifier: Apache-2.0
// Memory of the host that a GPU reads and writes without help.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "kernels/cuda/launch.h"

namespace treeattn::kernels::cuda {

class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  ~PinnedBuffer() { cudaFreeHost(data_); }
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(data_); }
  std::size_t bytes() const { return bytes_; }
  // The content is lost.
  void resize(std::size_t bytes) {
    cudaFreeHost(data_);
    data_ = nullptr;
    bytes_ = 0;
    check(cudaHostAlloc(&data_, bytes, cudaHostAllocDefault), "pinned memory");
    bytes_ = bytes;
  }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace treeattn::kernels::cuda
