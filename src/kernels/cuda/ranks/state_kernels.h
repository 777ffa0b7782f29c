// SPDX-License-Identifier: Apache-2.0
// Packed states [rows, v_dim + 2] on a GPU: the device's counterpart of merge/rows.h and of the allreduces of
// parallel/reduce.cc. Everything is put on a stream of the current GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <span>

namespace treeattn::kernels::cuda {

// Rows [rows, row_floats].
struct RowShape {
  std::size_t rows = 0;
  std::size_t row_floats = 0;
  std::size_t floats() const { return rows * row_floats; }
};

// Block `lower` becomes merge(lower, higher), row by row, bit for bit as merge::merge_rows.
struct MergeStep {
  float* lower = nullptr;
  const float* higher = nullptr;
};
// One after the other; one launch for many steps.
void merge_blocks(std::span<const MergeStep> steps, RowShape shape, cudaStream_t stream);

// By a kernel and not by a copy engine: a copy there that waits for its stream holds up those of other streams, for
// which kernels of the first may be waiting.
void copy_floats(float* to, const float* from, std::size_t count, cudaStream_t stream);

// Every row becomes the identity.
void clear_rows(float* states, RowShape shape, cudaStream_t stream);

// finalize_states (treeattn/state.h): out [rows, v_dim], lse [rows] or null, sinks [heads] or null.
void finalize(const float* states, RowShape shape, const float* sinks, std::size_t heads, float* out, float* lse,
              cudaStream_t stream);

// In two phases. top [rows] gets the maxima; with top the largest over the ranks, sums [rows, row_floats - 1] get l and
// o as they weigh there; and from both together the states of the union.
void take_maxima(const float* states, RowShape shape, float* top, cudaStream_t stream);
void weigh_sums(const float* states, const float* top, RowShape shape, float* sums, cudaStream_t stream);
void join_sums(const float* top, const float* sums, RowShape shape, float* states, cudaStream_t stream);

// As in the paper. lse [rows] in log2, o [rows, v_dim] normalised; then o as it weighs against the largest lse, and the
// weight.
void normalise(const float* states, RowShape shape, float* lse, float* o, cudaStream_t stream);
void weigh_normalised(const float* lse, const float* top, RowShape shape, float* o, float* weight, cudaStream_t stream);
void join_normalised(const float* top, const float* weight, const float* o, RowShape shape, float* states,
                     cudaStream_t stream);

}  // namespace treeattn::kernels::cuda
