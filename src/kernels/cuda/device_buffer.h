// SPDX-License-Identifier: Apache-2.0
// GPU memory that is freed with its owner, and the current GPU set for a scope.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <utility>

#include "kernels/cuda/launch.h"

namespace treeattn::kernels::cuda {

// Makes a GPU the current one of this thread and goes back to the last one.
class UseDevice {
 public:
  explicit UseDevice(int gpu) : gpu_(gpu) {
    check(cudaGetDevice(&before_), "current GPU");
    if (before_ != gpu_) check(cudaSetDevice(gpu_), "choice of the GPU");
  }
  ~UseDevice() {
    if (before_ != gpu_) cudaSetDevice(before_);
  }
  UseDevice(const UseDevice&) = delete;
  UseDevice& operator=(const UseDevice&) = delete;

 private:
  int gpu_;
  int before_ = 0;
};

// Throws Unavailable, with what is free, when there is too little.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(std::size_t bytes);
  ~DeviceBuffer() { cudaFree(data_); }
  DeviceBuffer(DeviceBuffer&& other) noexcept { swap(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    swap(other);
    return *this;
  }

  // A copy of host memory; null for none. It is there when this returns, for every stream: cudaMemcpy alone may return
  // when the host's side of it is done.
  template <class T>
  static DeviceBuffer copy_of(const T* from, std::size_t count) {
    DeviceBuffer out(count * sizeof(T));
    if (count == 0) return out;
    check(cudaMemcpy(out.data_, from, count * sizeof(T), cudaMemcpyHostToDevice), "copy to the GPU");
    check(cudaStreamSynchronize(cudaStreamLegacy), "copy to the GPU");
    return out;
  }

  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  std::size_t bytes() const { return bytes_; }

 private:
  void swap(DeviceBuffer& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace treeattn::kernels::cuda
