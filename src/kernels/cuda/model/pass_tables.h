// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <cstring>

#include "kernels/cuda/device_buffer.h"
#include "kernels/cuda/pinned_buffer.h"
#include "kernels/model_ops.h"

namespace treeattn::kernels::cuda {

// What a pass has in the host's memory, and its copy on the GPU: tokens, positions.
class PassTables {
 public:
  // Room for so many rows. True where the memory is another now.
  bool reserve(std::size_t rows, cudaStream_t stream) {
    if (rows <= rows_) return false;
    check(cudaStreamSynchronize(stream), "last pass");
    rows_ = rows + rows / 4;
    host_.resize(bytes());
    device_ = DeviceBuffer(bytes());
    return true;
  }
  void put(const PassRows& rows) {
    std::memcpy(host_.data(), rows.positions.data(), rows.positions.size_bytes());
    std::memcpy(host_.data() + rows_ * sizeof(std::int64_t), rows.tokens.data(), rows.tokens.size_bytes());
  }
  void send(cudaStream_t stream) {
    check(cudaMemcpyAsync(device_.as<void>(), host_.data(), bytes(), cudaMemcpyHostToDevice, stream), "copy of tokens");
  }
  const std::int64_t* positions() const { return device_.as<std::int64_t>(); }
  const std::int32_t* tokens() const {
    return reinterpret_cast<const std::int32_t*>(device_.as<std::byte>() + rows_ * sizeof(std::int64_t));
  }

 private:
  std::size_t bytes() const { return rows_ * (sizeof(std::int64_t) + sizeof(std::int32_t)); }
  std::size_t rows_ = 0;
  PinnedBuffer host_;
  DeviceBuffer device_;
};

}  // namespace treeattn::kernels::cuda
