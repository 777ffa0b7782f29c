// SPDX-License-Identifier: Apache-2.0
// What a benchmark asks of a GPU: how long work takes there, and the limits that it is held against. This header needs
// no CUDA; without it the constructor throws.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "kernels/cuda/ranks/rank_device.h"
#include "treeattn/dtype.h"

namespace treeattn::kernels::cuda {

class GpuMeter {
 public:
  // Works on the device's stream. Throws Unavailable.
  explicit GpuMeter(RankDevice& device);
  ~GpuMeter();
  GpuMeter(const GpuMeter&) = delete;
  GpuMeter& operator=(const GpuMeter&) = delete;

  // Between two events around what `work` puts on the stream, launches included. Waits for it.
  double milliseconds(const std::function<void()>& work);

  // Puts a plain read on the stream, 16 bytes a load. Requires a multiple of 16 bytes.
  void read(const void* from, std::size_t bytes);

  // Rate of multiply-adds (two operations each) that stay in registers, 1e9 a second: of float32 plain ones, of the
  // other types those of tensor cores by mma.sync with float32 sums. Bytes become bfloat16 or float16, so theirs are
  // such.
  double multiply_add_gflops(DType type);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace treeattn::kernels::cuda
