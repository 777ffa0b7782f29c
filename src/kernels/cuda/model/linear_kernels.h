// SPDX-License-Identifier: Apache-2.0
// Linear maps of a few rows, as decode has them: the weights go past once. The bits of a row do not depend on how many
// come with it.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/cuda/model/model_kernels.h"
#include "kernels/cuda/step_target.h"

namespace treeattn::kernels::cuda {

// ---- bfloat16 and int8 weights on tensor cores

inline constexpr std::int64_t kStreamedRows = 16;  // most rows of one launch
inline constexpr int kStreamedMaps = 3;            // and most maps

// y [rows, w.rows] = x w^T for each of the maps, whose weights are of one type; or some columns of a wider y.
struct StreamedMap {
  const void* w = nullptr;
  float* y = nullptr;
  std::int64_t rows = 0;          // of w
  std::int64_t pitch = 0;         // floats from one row of y to the next; 0: rows
  const float* scales = nullptr;  // null: bfloat16; else int8, and a scale for every kWeightGroup columns of a row
};

// Rows of x in bfloat16. Where a norm comes before the map they are only multiplied by its weights, and come with sums
// of their squares (norm.cuh): the result is then multiplied by 1 / sqrt(mean(x^2) + eps) of the row.
struct StreamedRows {
  const std::uint16_t* rounded = nullptr;  // [rows, cols]
  const float* squares = nullptr;          // [rows, cols / kNormPart], or null
  const float* unrounded = nullptr;        // [rows, cols], before the norm, where there are squares
  float eps = 0;
};

// The norm that y goes through next: its weights, and where y times them goes, as StreamedRows wants it.
struct NextNorm {
  const float* weight = nullptr;  // null: there is none
  std::uint16_t* scaled = nullptr;
  float* squares = nullptr;
};

// Whether `stream_linear` takes this matrix.
bool can_stream(const WeightMatrix& w);

// Maps of the same cols.
void stream_linear(std::span<const StreamedMap> maps, std::int64_t cols, const StreamedRows& x, std::int64_t rows,
                   const Queue& queue);
// y += x w^T.
void stream_added(const StreamedMap& map, std::int64_t cols, const StreamedRows& x, std::int64_t rows,
                  const NextNorm& next, const Queue& queue);
// q, k and v of a decode step, turned, and put where attention finds them; where takes_step says so.
bool takes_step(const StepTarget& target, std::int64_t rows);
void stream_step(std::span<const StreamedMap> qkv, std::int64_t cols, const StreamedRows& x, std::int64_t rows,
                 const StepTarget& target, const Queue& queue);
// y [rows, gate.rows] = swiglu(x gate^T, x up^T), in bfloat16, and not to the y of the maps.
void stream_gated(const StreamedMap& gate, const StreamedMap& up, std::int64_t cols, const StreamedRows& x,
                  std::int64_t rows, std::uint16_t* y, const Queue& queue);

// ---- every type and size, in float32

// x as the contract of model_ops.h has it: float32, rounded here where the weights are bfloat16 or int8.
void plain_linear(const WeightMatrix& w, const float* x, std::int64_t rows, float* y, bool add, const Queue& queue);

}  // namespace treeattn::kernels::cuda
