// SPDX-License-Identifier: Apache-2.0
// What the kernels of a pass look up, on its way to the GPU.
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
  bool has_room(std::size_t rows) const { return rows <= rows_; }
  // Room for so many rows, in other memory.
  void grow(std::size_t rows, cudaStream_t stream) {
    check(cudaStreamSynchronize(stream), "last pass");
    rows_ = 0;  // there is no room, should the rest throw
    const std::size_t wanted = rows + rows / 4;
    host_.resize(bytes_of(wanted));
    device_ = DeviceBuffer(bytes_of(wanted));
    rows_ = wanted;
  }
  void put(const PassRows& rows) {
    std::memcpy(host_.data(), rows.positions.data(), rows.positions.size_bytes());
    std::memcpy(host_.data() + rows_ * sizeof(std::int64_t), rows.tokens.data(), rows.tokens.size_bytes());
  }
  void send(cudaStream_t stream) {
    check(cudaMemcpyAsync(device_.as<void>(), host_.data(), bytes_of(rows_), cudaMemcpyHostToDevice, stream),
          "copy of tokens");
  }
  const std::int64_t* positions() const { return device_.as<std::int64_t>(); }
  const std::int32_t* tokens() const {
    return reinterpret_cast<const std::int32_t*>(device_.as<std::byte>() + rows_ * sizeof(std::int64_t));
  }

 private:
  static std::size_t bytes_of(std::size_t rows) { return rows * (sizeof(std::int64_t) + sizeof(std::int32_t)); }
  std::size_t rows_ = 0;
  PinnedBuffer host_;
  DeviceBuffer device_;
};

}  // namespace treeattn::kernels::cuda
