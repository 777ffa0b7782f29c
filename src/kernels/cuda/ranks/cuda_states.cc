// SPDX-License-Identifier: Apache-2.0
#include "treeattn/cuda_states.h"

#include "base/check.h"
#include "kernels/cuda/ranks/state_kernels.h"
#include "treeattn/state.h"

namespace treeattn {
namespace {

using base::require;

kernels::cuda::RowShape shape_of(std::size_t rows, std::int64_t v_dim) {
  require(v_dim >= 1, "v_dim = {}; accepted: 1 or more", v_dim);
  return {rows, state_floats(v_dim)};
}

cudaStream_t as_stream(void* stream) { return static_cast<cudaStream_t>(stream); }

}  // namespace

void cuda_identity_states(float* states, std::size_t rows, std::int64_t v_dim, void* stream) {
  kernels::cuda::clear_rows(states, shape_of(rows, v_dim), as_stream(stream));
}

void cuda_merge_states(float* lower, const float* higher, std::size_t rows, std::int64_t v_dim, void* stream) {
  const kernels::cuda::MergeStep step{lower, higher};
  kernels::cuda::merge_blocks({&step, 1}, shape_of(rows, v_dim), as_stream(stream));
}

void cuda_finalize_states(const float* states, std::size_t rows, std::int64_t v_dim, const float* sinks,
                          std::size_t heads, float* out, float* lse, void* stream) {
  const kernels::cuda::RowShape shape = shape_of(rows, v_dim);
  require((sinks == nullptr) == (heads == 0), "sinks = {} with heads = {}; accepted: null with 0 heads, else both",
          static_cast<const void*>(sinks), heads);
  require(heads == 0 || rows % heads == 0, "heads = {}; accepted: a divisor of rows = {}", heads, rows);
  kernels::cuda::finalize(states, shape, sinks, heads, out, lse, as_stream(stream));
}

}  // namespace treeattn
