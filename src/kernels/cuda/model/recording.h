// SPDX-License-Identifier: Apache-2.0
// A decode step as a CUDA graph.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/cuda/launch.h"

namespace treeattn::kernels::cuda {

// A decode step that was recorded.
class Recording {
 public:
  ~Recording() {
    if (graph_ != nullptr) cudaGraphExecDestroy(graph_);
  }
  Recording() = default;
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  bool is(const std::vector<std::int64_t>& key) const { return !key_.empty() && key == key_; }

  void record(const std::vector<std::int64_t>& key, cudaStream_t stream, const std::function<void()>& work) {
    if (graph_ != nullptr) cudaGraphExecDestroy(graph_);
    graph_ = nullptr;
    key_.clear();
    cudaGraph_t recorded = nullptr;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "recording");
    try {
      work();
    } catch (...) {
      cudaStreamEndCapture(stream, &recorded);
      if (recorded != nullptr) cudaGraphDestroy(recorded);
      cudaGetLastError();
      throw;
    }
    check(cudaStreamEndCapture(stream, &recorded), "recording");
    const cudaError_t error = cudaGraphInstantiate(&graph_, recorded, 0);
    cudaGraphDestroy(recorded);
    check(error, "recording");
    check(cudaGraphUpload(graph_, stream), "recording");  // or the first play() would, and allocate for it
    key_ = key;
  }

  void play(cudaStream_t stream) { check(cudaGraphLaunch(graph_, stream), "recorded work"); }

 private:
  cudaGraphExec_t graph_ = nullptr;
  std::vector<std::int64_t> key_;
};

}  // namespace treeattn::kernels::cuda
