// SPDX-License-Identifier: Apache-2.0
#include "kernels/model_ops.h"

#include "base/check.h"

namespace treeattn::kernels {

void check_weights(const WeightMatrix& w, const char* what) {
  base::require(w.rows >= 1 && w.cols >= 1, "{}: weights [{}, {}]; accepted: 1 or more of each", what, w.rows, w.cols);
  base::require(w.data != nullptr, "{}: weights are null", what);
  base::require(w.dtype != DType::kFp8E4M3, "{}: weights of {}; accepted: float32, float16, bfloat16, int8", what,
                dtype_name(w.dtype));
  if (w.dtype != DType::kInt8) return;
  base::require(w.group == kWeightGroup && w.cols % kWeightGroup == 0,
                "{}: int8 weights of {} columns in groups of {}; accepted: whole groups of {}", what, w.cols, w.group,
                kWeightGroup);
  base::require(w.scales != nullptr, "{}: int8 weights without scales", what);
}

void ModelOps::norm_linear(const float* x, const float* norm, float eps, std::int64_t rows, float* normed,
                           std::span<const Projection> projections) {
  if (projections.empty()) return;
  rms_norm(x, norm, eps, rows, projections.front().w.cols, normed);
  for (const Projection& one : projections) linear(one.w, normed, rows, one.y, false);
}

const float* ModelOps::norm_linear_to_host(const float* x, const float* norm, float eps, std::int64_t rows,
                                           float* normed, const Projection& one) {
  norm_linear(x, norm, eps, rows, normed, {&one, 1});
  return one.y;
}

void ModelOps::feed_forward(const FeedForward& f, std::int64_t rows, float* x) {
  const std::int64_t dim = f.gate.rows;
  // All gates, then all ups: to swiglu, which goes element by element, one long row.
  const Projection both[] = {{f.gate, f.gate_up}, {f.up, f.gate_up + rows * dim}};
  norm_linear(x, f.norm, f.eps, rows, f.normed, both);
  swiglu(f.gate_up, 1, rows * dim, f.activated);
  add_linear(f.down, f.activated, rows, x, f.next_norm);
}

std::unique_ptr<ModelOps> make_model_ops(int gpu, ThreadPool& pool) {
  return gpu < 0 ? cpu_model_ops(pool) : cuda_model_ops(gpu);
}

}  // namespace treeattn::kernels
