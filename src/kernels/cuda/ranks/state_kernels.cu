// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "kernels/cuda/dependent_launch.cuh"
#include "kernels/cuda/ranks/state_kernels.h"
#include "kernels/cuda/ranks/warp_rows.cuh"

namespace treeattn::kernels::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kStepsAtOnce = 200;  // 3.2 KB of kernel arguments, of 4

struct MergeList {
  MergeStep steps[kStepsAtOnce];
  int count = 0;
};

// A warp to a row: rows do not depend on each other, so no two blocks have to wait for one another.
__global__ void merge_kernel(const __grid_constant__ MergeList list, RowShape shape) {
  const std::size_t row = blockIdx.x * std::size_t{kWarps} + threadIdx.x / kLanes;
  if (row >= shape.rows) return;
  const std::size_t at = row * shape.row_floats;
  for (int i = 0; i < list.count; ++i) {
    warp_merge_row(list.steps[i].lower + at, list.steps[i].higher + at, static_cast<int>(shape.row_floats));
  }
}

// body(row, c) for every place of [rows, columns].
template <class Body>
__global__ void each_kernel(std::size_t rows, std::size_t columns, Body body) {
  const std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x;
  if (i < rows * columns) body(i / columns, i % columns);
}

template <class Body>
void for_each(std::size_t rows, std::size_t columns, cudaStream_t stream, const char* what, Body body) {
  constexpr unsigned kThreads = 256;
  const auto blocks = static_cast<unsigned>((rows * columns + kThreads - 1) / kThreads);
  if (blocks == 0) return;
  start_dependent(each_kernel<Body>, blocks, kThreads, false, stream, what, rows, columns, body);
}

}  // namespace

void merge_blocks(std::span<const MergeStep> steps, RowShape shape, cudaStream_t stream) {
  if (shape.rows == 0) return;
  while (!steps.empty()) {
    MergeList list;
    list.count = static_cast<int>(std::min<std::size_t>(steps.size(), kStepsAtOnce));
    std::copy_n(steps.begin(), list.count, list.steps);
    steps = steps.subspan(static_cast<std::size_t>(list.count));
    start_dependent(merge_kernel, static_cast<unsigned>((shape.rows + kWarps - 1) / kWarps), kWarps * kLanes, false,
                    stream, "merge of states", list, shape);
  }
}

void copy_floats(float* to, const float* from, std::size_t count, cudaStream_t stream) {
  for_each(1, count, stream, "copy of states", [=] __device__(std::size_t, std::size_t i) { to[i] = from[i]; });
}

void clear_rows(float* states, RowShape shape, cudaStream_t stream) {
  for_each(shape.rows, shape.row_floats, stream, "clearing of states", [=] __device__(std::size_t r, std::size_t c) {
    states[r * shape.row_floats + c] = c == 0 ? merge::kEmptyMax : 0.0f;
  });
}

void finalize(const float* states, RowShape shape, const float* sinks, std::size_t heads, float* out, float* lse,
              cudaStream_t stream) {
  const std::size_t v_dim = shape.row_floats - 2;
  for_each(shape.rows, v_dim, stream, "end of states", [=] __device__(std::size_t r, std::size_t c) {
    const float* row = states + r * shape.row_floats;
    // A sink is the state of one key whose value is zero.
    float merged[3] = {row[0], row[1], row[2 + c]};
    if (sinks != nullptr) {
      const float logit = sinks[r % heads] * merge::kLog2E;
      const float sink[3] = {logit, merge::state_weight(logit, logit), 0.0f};  // as finalize_states
      merge::merge_row(merged, sink, 3);
    }
    out[r * v_dim + c] = merge::finished(merged[0], merged[1], merged[2]);
    if (c != 0 || lse == nullptr) return;
    lse[r] = merged[0] == merge::kEmptyMax ? merge::kEmptyMax : merge::row_lse(merged[0], merged[1]);
  });
}

void take_maxima(const float* states, RowShape shape, float* top, cudaStream_t stream) {
  for_each(shape.rows, 1, stream, "maxima of states",
           [=] __device__(std::size_t r, std::size_t) { top[r] = states[r * shape.row_floats]; });
}

void weigh_sums(const float* states, const float* top, RowShape shape, float* sums, cudaStream_t stream) {
  const std::size_t rest = shape.row_floats - 1;
  for_each(shape.rows, rest, stream, "weights of states", [=] __device__(std::size_t r, std::size_t c) {
    const float* row = states + r * shape.row_floats;
    // An empty state is selected away: its sums may hold anything.
    sums[r * rest + c] = row[0] == merge::kEmptyMax ? 0.0f : row[1 + c] * merge::state_weight(row[0], top[r]);
  });
}

void join_sums(const float* top, const float* sums, RowShape shape, float* states, cudaStream_t stream) {
  for_each(shape.rows, shape.row_floats, stream, "union of states", [=] __device__(std::size_t r, std::size_t c) {
    states[r * shape.row_floats + c] = c == 0 ? top[r] : sums[r * (shape.row_floats - 1) + c - 1];
  });
}

void normalise(const float* states, RowShape shape, float* lse, float* o, cudaStream_t stream) {
  const std::size_t v_dim = shape.row_floats - 2;
  for_each(shape.rows, v_dim, stream, "normalisation of states", [=] __device__(std::size_t r, std::size_t c) {
    const float* row = states + r * shape.row_floats;
    o[r * v_dim + c] = merge::finished(row[0], row[1], row[2 + c]);
    if (c == 0) lse[r] = row[0] == merge::kEmptyMax ? merge::kEmptyMax : row[0] + log2f(row[1]);
  });
}

void weigh_normalised(const float* lse, const float* top, RowShape shape, float* o, float* weight,
                      cudaStream_t stream) {
  const std::size_t v_dim = shape.row_floats - 2;
  for_each(shape.rows, v_dim, stream, "weights of states", [=] __device__(std::size_t r, std::size_t c) {
    const float w = lse[r] == merge::kEmptyMax ? 0.0f : merge::state_weight(lse[r], top[r]);
    o[r * v_dim + c] *= w;
    if (c == 0) weight[r] = w;
  });
}

void join_normalised(const float* top, const float* weight, const float* o, RowShape shape, float* states,
                     cudaStream_t stream) {
  const std::size_t v_dim = shape.row_floats - 2;
  for_each(shape.rows, shape.row_floats, stream, "union of states", [=] __device__(std::size_t r, std::size_t c) {
    states[r * shape.row_floats + c] = c == 0 ? top[r] : c == 1 ? weight[r] : o[r * v_dim + c - 2];
  });
}

}  // namespace treeattn::kernels::cuda
