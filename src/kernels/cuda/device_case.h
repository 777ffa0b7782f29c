// SPDX-License-Identifier: Apache-2.0
// A case of the one list with its q, K and V on a GPU, and what the GPU makes of it: for the tests and for `treeattn
// verify`. This header needs no CUDA; without it the constructor throws.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/case_list.h"

namespace treeattn::kernels::cuda {

struct DeviceOutput {
  std::vector<float> out;  // [batch, queries, heads, v_dim]
  std::vector<float> lse;  // [batch, queries, heads]
  std::string kernel;      // that served the call, as CudaPlan names it
};

// Every buffer is an allocation of its own and as long as its view: what lies beyond is not ours.
class DeviceCase {
 public:
  // Throws Unavailable.
  explicit DeviceCase(const CaseData& data, int gpu = 0);
  ~DeviceCase();
  DeviceCase(const DeviceCase&) = delete;
  DeviceCase& operator=(const DeviceCase&) = delete;

  // With the addresses on the GPU.
  const AttentionInput& input() const;
  // By a CudaPlan of its own, into memory that held NaN.
  DeviceOutput run() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace treeattn::kernels::cuda
