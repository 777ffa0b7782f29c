// SPDX-License-Identifier: Apache-2.0
// Small kernels over rows: conversion of new keys and values, and a plain read to measure bandwidth.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "treeattn/dtype.h"

namespace treeattn::kernels::cuda {

// Rows [tokens, heads, dim] from strided ones of another type to dense ones. Strides are in elements.
struct RowConversion {
  const std::byte* from = nullptr;
  const float* from_scales = nullptr;  // null: none, or 1
  std::int64_t token_stride = 0, head_stride = 0;
  std::int64_t scale_token_stride = 0, scale_head_stride = 0;
  DType from_type = DType::kFloat32;
  std::int64_t tokens = 0;
  int heads = 0;
  int dim = 0;  // at most 256
  DType to_type = DType::kFloat32;
  std::byte* to = nullptr;     // [tokens, heads, dim]
  float* to_scales = nullptr;  // [tokens, heads], null where the type has none
};
void convert_rows(const RowConversion& conversion, cudaStream_t stream);

// Random bfloat16 numbers between 0.5 and 2, of either sign.
void fill_noise(std::uint16_t* to, std::size_t count, std::uint32_t seed, cudaStream_t stream);

// Reads `bytes` (a multiple of 16) and writes one number.
void read_all(const void* data, std::size_t bytes, unsigned* sink, cudaStream_t stream);

}  // namespace treeattn::kernels::cuda
