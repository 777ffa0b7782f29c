// SPDX-License-Identifier: Apache-2.0
// From an ExchangePlan to what its kernel is told of the merge.
#pragma once

#include <vector>

#include "kernels/cuda/device_buffer.h"
#include "kernels/cuda/pinned_buffer.h"
#include "kernels/cuda/ranks/peer_exchange.h"
#include "kernels/cuda/ranks/peer_kernel.h"

namespace treeattn::kernels::cuda {

inline DeviceBuffer merges_on_gpu(const ExchangePlan& plan) {
  std::vector<int> merges;
  for (const auto& [lower, higher] : plan.merges) {
    merges.push_back(lower);
    merges.push_back(higher);
  }
  return DeviceBuffer::copy_of(merges.data(), merges.size());
}

// told: where the root's block goes first.
inline PeerParams merge_params(const ExchangePlan& plan, const int* merges, const PinnedBuffer& told) {
  PeerParams p;
  p.all_blocks = plan.first_block.back();
  p.merges = merges;
  p.merge_count = static_cast<int>(plan.merges.size());
  p.rows = static_cast<std::int64_t>(plan.rows);
  p.row_floats = static_cast<int>(plan.row_floats);
  p.root = plan.root;
  void* on_gpu = nullptr;
  check(cudaHostGetDevicePointer(&on_gpu, told.data(), 0), "pinned memory");
  p.result = static_cast<float*>(on_gpu);
  return p;
}

}  // namespace treeattn::kernels::cuda
