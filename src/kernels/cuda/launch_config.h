// SPDX-License-Identifier: Apache-2.0
// How a kernel is started, for kernels that may be started while the one before them is still running.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace treeattn::kernels::cuda {

// early: before the last kernel of the stream is done; the kernel then waits for it itself (wait_for_earlier in
// dependent_launch.cuh).
class LaunchConfig {
 public:
  LaunchConfig(dim3 blocks, unsigned threads, std::size_t shared_bytes, bool early, cudaStream_t stream) {
    config_.gridDim = blocks;
    config_.blockDim = threads;
    config_.dynamicSmemBytes = shared_bytes;
    config_.stream = stream;
    attribute_.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute_.val.programmaticStreamSerializationAllowed = 1;
    config_.attrs = &attribute_;
    config_.numAttrs = early ? 1 : 0;
  }
  LaunchConfig(const LaunchConfig&) = delete;
  LaunchConfig& operator=(const LaunchConfig&) = delete;

  const cudaLaunchConfig_t* get() const { return &config_; }

 private:
  cudaLaunchConfig_t config_{};
  cudaLaunchAttribute attribute_{};
};

}  // namespace treeattn::kernels::cuda
