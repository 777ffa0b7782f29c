// SPDX-License-Identifier: Apache-2.0
// The kernels of a decoder layer beside its matrices, as the host calls them. Each works row by row. All pointers are
// GPU memory of the current GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/model_ops.h"

namespace treeattn::kernels::cuda {

// Where work goes. overlaps: kernels may be started early (dependent_launch.cuh).
struct Queue {
  cudaStream_t stream = nullptr;
  bool overlaps = false;
  int multiprocessors = 1;
};

// x [rows, table.cols] = rows of the table, by token.
void embed_rows(const WeightMatrix& table, const std::int32_t* tokens, std::int64_t rows, float* x, const Queue& queue);

// y [rows, dim], in float32 or in bfloat16; the other null.
void rms_norm_rows(const float* x, const float* weight, float eps, std::int64_t rows, std::int64_t dim, float* y,
                   std::uint16_t* y_bf16, const Queue& queue);

inline constexpr int kNormPart = 8;  // neighbours whose squares are added up first, where a linear map follows

// The part of a norm that can be done before the size of a row is known: x times the weights [rows, dim], in bfloat16,
// and the sums of squares of every kNormPart neighbours of x. dim is a multiple of that.
void scale_rows(const float* x, const float* weight, std::int64_t rows, std::int64_t dim, std::uint16_t* scaled,
                float* squares, const Queue& queue);

// Rounded to nearest.
void to_bfloat16(const float* x, std::int64_t count, std::uint16_t* y, const Queue& queue);

// to [w.rows, w.cols]: int8 weights times their scales, rounded to bfloat16. For matrices that can_stream takes.
void unpack_weights(const WeightMatrix& w, std::uint16_t* to, const Queue& queue);

// angles [rows, 2, half]: cosines, then sines, of position * frequency in double precision.
void fill_angles(const std::int64_t* positions, const double* frequencies, std::int64_t rows, std::int64_t half,
                 float* angles, const Queue& queue);

// Turns every head of x [rows, heads, 2 * half].
void rope_rows(float* x, std::int64_t rows, std::int64_t heads, std::int64_t half, const float* angles,
               const Queue& queue);

void swiglu_rows(const float* gate_up, std::int64_t rows, std::int64_t dim, float* y, const Queue& queue);

// The same of gates and ups that lie apart, count of each, in bfloat16.
void swiglu_to_bfloat16(const float* gates, const float* ups, std::int64_t count, std::uint16_t* y, const Queue& queue);

}  // namespace treeattn::kernels::cuda
