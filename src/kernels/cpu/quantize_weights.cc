// SPDX-License-Identifier: Apache-2.0
// Weights to int8, a group at a time, on all threads.
#include <algorithm>

#include "base/check.h"
#include "base/round_up.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/linear.h"

namespace treeattn::kernels {

void quantize_weights(const WeightMatrix& w, std::int8_t* values, float* scales, ThreadPool& pool) {
  check_weights(w, "quantize_weights");
  base::require(w.dtype != DType::kInt8, "quantize_weights: weights of int8; accepted: float32, float16, bfloat16");
  base::require(w.cols % kWeightGroup == 0, "quantize_weights: {} columns; accepted: multiples of {}", w.cols,
                kWeightGroup);
  constexpr std::int64_t kTaskGroups = 2048;
  const std::int64_t groups = w.rows * w.cols / kWeightGroup;
  const auto group_bytes = static_cast<std::int64_t>(dtype_size(w.dtype)) * kWeightGroup;
  const auto quantize = active_target().model->quantize[static_cast<int>(w.dtype)];
  pool.run(static_cast<std::size_t>(base::divide_up(groups, kTaskGroups)), [&](std::size_t task, int) {
    const std::int64_t g = static_cast<std::int64_t>(task) * kTaskGroups;
    quantize(static_cast<const std::byte*>(w.data) + g * group_bytes, std::min(kTaskGroups, groups - g),
             values + g * kWeightGroup, scales + g);
  });
}

}  // namespace treeattn::kernels
