// SPDX-License-Identifier: Apache-2.0
// y = x w^T on the CPU: cuts the work into tasks for the threads and hands them to the kernels of one instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/buffer.h"
#include "kernels/cpu/model_kernels.h"
#include "kernels/model_ops.h"
#include "treeattn/thread_pool.h"

namespace treeattn::kernels {

// Keeps its memory from call to call: packed rows of x (up to 512 of them) and a block of weights for each thread.
class LinearMap {
 public:
  LinearMap(const ModelKernels& kernels, ThreadPool& pool);
  // y [rows, w.rows] = x [rows, w.cols] w^T for each of the maps, which have the same number of columns; add: y +=
  // that.
  void multiply(std::span<const Projection> maps, const float* x, std::int64_t rows, bool add);

 private:
  void pack(const LinearOps& ops, const float* x, std::int64_t rows, std::int64_t cols);
  void multiply_row(const LinearOps& ops, std::span<const Projection> maps, std::int64_t row, bool add);
  void multiply_rows(const LinearOps& ops, const Projection& map, std::int64_t first, std::int64_t rows, bool add);
  LinearArgs args_of(const Projection& map, std::int64_t row, int thread, bool add);

  const ModelKernels& kernels_;
  ThreadPool& pool_;
  base::Buffer packed_;
  base::Buffer scratch_;
};

}  // namespace treeattn::kernels
