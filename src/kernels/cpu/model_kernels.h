// SPDX-License-Identifier: Apache-2.0
// The operations of a decoder layer beside attention, behind one table per instruction set: linear maps by weight type,
// and the work on single rows. Threads, checks and the order of the tasks are plain C++ above it (linear.cc,
// model_ops_cpu.cc).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/activations.h"

namespace treeattn::kernels {

// Most rows of x that one call of LinearOps::multiply takes, and rows of weights it works on at once.
inline constexpr int kLinearRows = 256;
inline constexpr int kLinearBlock = 64;
inline constexpr std::size_t kLinearScratchBytes = std::size_t{384} << 10;  // of each thread

struct LinearArgs {
  const std::byte* x = nullptr;  // tiles of rows, one after the other, as pack_tile made them
  std::int64_t rows = 0;         // of x: 1 to kLinearRows
  std::int64_t cols = 0;
  const std::byte* w = nullptr;   // row 0 of the whole matrix
  const float* scales = nullptr;  // [rows of w, cols / kWeightGroup], int8 only
  std::int64_t begin = 0;         // rows of w to work on: [begin, end)
  std::int64_t end = 0;
  // > 0, with one row of x and a kernel of four streams: those rows, and the rows 1, 2 and 3 times as many further on.
  std::int64_t stream = 0;
  float* y = nullptr;  // y[row * y_stride + n] for row n of w
  std::int64_t y_stride = 0;
  bool add = false;
  std::byte* scratch = nullptr;  // kLinearScratchBytes, aligned to a cache line
};

// Linear maps with weights of one type. Each element of y is added up in an order that depends on the number of columns
// alone, so a row comes out the same whichever rows it shares a call with.
struct LinearOps {
  Activations activations;
  int tile_rows;  // rows of x that are packed together
  int streams;    // runs of weights that one row of x meets side by side: 4 (LinearArgs::stream), or 1
  std::size_t (*tile_bytes)(std::int64_t cols);  // of a packed tile, a multiple of a cache line
  // rows <= tile_rows. A call's last tile may have fewer; its layout may depend on that.
  void (*pack_tile)(const float* x, int rows, std::int64_t cols, std::byte* packed);
  void (*multiply)(const LinearArgs&);
  double unit_roundoff;     // of its multiplications and additions
  bool flushes_subnormals;  // factors and results below 2^-126 may count as zero
};

// One instruction set.
struct ModelKernels {
  LinearOps linear[4];  // by DType of the weights: float32, float16, bfloat16, int8
  // Numbers to int8 with a scale for every kWeightGroup, by DType: float32, float16, bfloat16. values [groups,
  // kWeightGroup], scales [groups]; the same bits as base::quantize_row_int8 on every target.
  void (*quantize[3])(const std::byte* from, std::int64_t groups, std::int8_t* values, float* scales);
  // y = x / sqrt(mean(x^2) + eps) * weight, one row.
  void (*rms_norm)(const float* x, const float* weight, float eps, std::int64_t dim, float* y);
  // y = gate / (1 + exp(-gate)) * up
  void (*swiglu)(const float* gate, const float* up, std::int64_t dim, float* y);
  // Rotates pairs (i, i + half) of one head by angles given by cosine and sine [half].
  void (*rotate)(float* x, const float* cosine, const float* sine, std::int64_t half);
};

}  // namespace treeattn::kernels
