// SPDX-License-Identifier: Apache-2.0
// A case of the one list with its q, K and V on the GPU.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/case_list.h"

namespace treeattn::kernels {

inline void cuda_check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// Device memory of a test.
class DeviceMemory {
 public:
  explicit DeviceMemory(std::size_t bytes) {
    cuda_check(cudaMalloc(&data_, std::max<std::size_t>(bytes, 1)), "malloc");
  }
  DeviceMemory(const void* from, std::size_t bytes) : DeviceMemory(bytes) {
    cuda_check(cudaMemcpy(data_, from, bytes, cudaMemcpyHostToDevice), "copy");
  }
  ~DeviceMemory() { cudaFree(data_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
};

// Elements from the first row's begin to the last row's end.
inline std::size_t span_of(const KvView& view, bool scales) {
  const std::int64_t token = scales ? view.scale_token_stride : view.token_stride;
  const std::int64_t head = scales ? view.scale_head_stride : view.head_stride;
  const std::int64_t outer = view.page_tokens > 0 ? (scales ? view.scale_page_stride : view.page_stride)
                                                  : (scales ? view.scale_batch_stride : view.batch_stride);
  const std::int64_t outer_count = view.page_tokens > 0 ? view.pages : view.batch;
  const std::int64_t tokens = view.page_tokens > 0 ? view.page_tokens : view.tokens;
  if (outer_count == 0 || tokens == 0) return 0;
  return static_cast<std::size_t>((outer_count - 1) * outer + (tokens - 1) * token + (view.kv_heads - 1) * head +
                                  (scales ? 1 : view.head_dim));
}

class DeviceCase {
 public:
  explicit DeviceCase(const CaseData& data)
      : in_(data.input()),
        q_(in_.q.data, q_bytes(in_.q)),
        k_(in_.k.data, span_of(in_.k, false) * dtype_size(in_.k.dtype)),
        v_(in_.v.data, span_of(in_.v, false) * dtype_size(in_.v.dtype)),
        k_scales_(in_.k.scales, in_.k.scales ? span_of(in_.k, true) * sizeof(float) : 0),
        v_scales_(in_.v.scales, in_.v.scales ? span_of(in_.v, true) * sizeof(float) : 0) {
    in_.q.data = q_.as<void>();
    in_.k.data = k_.as<void>();
    in_.v.data = v_.as<void>();
    if (in_.k.scales) in_.k.scales = k_scales_.as<float>();
    if (in_.v.scales) in_.v.scales = v_scales_.as<float>();
  }
  const AttentionInput& input() const { return in_; }

 private:
  static std::size_t q_bytes(const QueryView& q) {
    return static_cast<std::size_t>((q.batch - 1) * q.batch_stride + (q.queries - 1) * q.query_stride +
                                    (q.heads - 1) * q.head_stride + q.head_dim) *
           dtype_size(q.dtype);
  }
  AttentionInput in_;
  DeviceMemory q_, k_, v_, k_scales_, v_scales_;
};

}  // namespace treeattn::kernels
