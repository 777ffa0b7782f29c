// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>

#include "kernels/cuda/device_buffer.h"
#include "kernels/cuda/device_case.h"
#include "treeattn/cuda.h"

namespace treeattn::kernels::cuda {
namespace {

// Elements from the first row's begin to the last row's end.
std::size_t span_of(const KvView& view, bool scales) {
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

std::size_t span_of(const QueryView& q) {
  return static_cast<std::size_t>((q.batch - 1) * q.batch_stride + (q.queries - 1) * q.query_stride +
                                  (q.heads - 1) * q.head_stride + q.head_dim);
}

// An address even where there is nothing to copy: a view without one is refused.
DeviceBuffer copy_of(const void* from, std::size_t bytes) {
  if (bytes == 0) return DeviceBuffer(1);
  return DeviceBuffer::copy_of(static_cast<const std::byte*>(from), bytes);
}

DeviceBuffer rows_of(const KvView& view) { return copy_of(view.data, span_of(view, false) * dtype_size(view.dtype)); }

DeviceBuffer scales_of(const KvView& view) {
  return view.scales == nullptr ? DeviceBuffer() : copy_of(view.scales, span_of(view, true) * sizeof(float));
}

// All bits set: NaN.
DeviceBuffer poisoned(std::size_t floats) {
  DeviceBuffer out(std::max<std::size_t>(floats, 1) * sizeof(float));
  check(cudaMemset(out.as<void>(), 0xff, out.bytes()), "poisoning of GPU memory");
  return out;
}

std::vector<float> copied_back(const DeviceBuffer& from, std::size_t floats) {
  std::vector<float> out(floats);
  check(cudaMemcpy(out.data(), from.as<float>(), floats * sizeof(float), cudaMemcpyDeviceToHost), "copy from the GPU");
  return out;
}

}  // namespace

struct DeviceCase::Impl {
  Impl(const CaseData& case_data, int index) : data(case_data), gpu(index), in(data.input()) {
    const UseDevice use(gpu);
    q = copy_of(in.q.data, span_of(in.q) * dtype_size(in.q.dtype));
    k = rows_of(in.k);
    v = rows_of(in.v);
    k_scales = scales_of(in.k);
    v_scales = scales_of(in.v);
    in.q.data = q.as<void>();
    in.k.data = k.as<void>();
    in.v.data = v.as<void>();
    in.k.scales = k_scales.as<float>();
    in.v.scales = v_scales.as<float>();
  }

  const CaseData& data;
  int gpu;
  AttentionInput in;
  DeviceBuffer q, k, v, k_scales, v_scales;
};

DeviceCase::DeviceCase(const CaseData& data, int gpu) : impl_(std::make_unique<Impl>(data, gpu)) {}
DeviceCase::~DeviceCase() = default;

const AttentionInput& DeviceCase::input() const { return impl_->in; }

DeviceOutput DeviceCase::run() const {
  const UseDevice use(impl_->gpu);
  const Case& shape = impl_->data.shape();
  const auto rows = static_cast<std::size_t>(shape.batch * shape.queries * shape.heads);
  const std::size_t floats = rows * static_cast<std::size_t>(shape.v_dim);
  const DeviceBuffer out = poisoned(floats), lse = poisoned(rows);
  CudaPlan plan(impl_->gpu, impl_->in, impl_->data.options());
  plan.attention(out.as<float>(), lse.as<float>(), nullptr);
  check(cudaStreamSynchronize(nullptr), "attention on the GPU");
  return {copied_back(out, floats), copied_back(lse, rows), plan.kernel()};
}

}  // namespace treeattn::kernels::cuda
