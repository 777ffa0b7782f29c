// SPDX-License-Identifier: Apache-2.0
// Products of bfloat16 matrices by cuBLASLt, for many rows. The algorithm is chosen once for a matrix, for a nominal
// number of rows, and is one that adds up every sum in one piece: so the bits of a row do not depend on how many come
// with it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>

namespace treeattn::kernels::cuda {

// One GPU, one stream at a time.
class MatrixProduct {
 public:
  explicit MatrixProduct(int gpu);
  ~MatrixProduct();
  MatrixProduct(const MatrixProduct&) = delete;
  MatrixProduct& operator=(const MatrixProduct&) = delete;

  // y [rows, outputs] = x [rows, inputs] w [outputs, inputs]^T; add: y += that. x and w in bfloat16. Throws Unavailable
  // where cuBLASLt has no algorithm; it has where inputs and outputs are multiples of 8.
  void multiply(const std::uint16_t* w, const std::uint16_t* x, std::int64_t rows, std::int64_t outputs,
                std::int64_t inputs, float* y, bool add, cudaStream_t stream);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace treeattn::kernels::cuda
