// SPDX-License-Identifier: Apache-2.0
// Which kernel serves which matrix, and what is done to the rows before they meet it.
#include <algorithm>
#include <vector>

#include "base/check.h"
#include "kernels/cuda/model/cuda_model_ops.h"
#include "kernels/cuda/model/linear_kernels.h"
#include "kernels/cuda/model/model_kernels.h"

namespace treeattn::kernels::cuda {
namespace {

// `count` rows of w from `first` on; all of them where it is 0.
StreamedMap map_of(const WeightMatrix& w, float* y, std::int64_t first = 0, std::int64_t count = 0) {
  const std::int64_t elements = first * w.cols;
  const auto* data = static_cast<const std::byte*>(w.data) + static_cast<std::size_t>(elements) * dtype_size(w.dtype);
  return {data, y, count == 0 ? w.rows : count, w.rows, w.scales == nullptr ? nullptr : w.scales + elements / w.group};
}

}  // namespace

NextNorm CudaModelOps::norm_memory(const float* norm, std::int64_t rows, std::int64_t cols) {
  const auto count = static_cast<std::size_t>(rows * cols);
  return {norm, static_cast<std::uint16_t*>(scratch(normalised_, count * sizeof(std::uint16_t))),
          static_cast<float*>(scratch(squares_, count / kNormPart * sizeof(float)))};
}

StreamedRows CudaModelOps::rows_for(Kernel kernel, const float* x, const float* norm, float eps, std::int64_t rows,
                                    std::int64_t cols) {
  const bool ready = take_ready({x, norm, rows});
  if (kernel == Kernel::kStream && norm != nullptr) {
    const NextNorm memory = norm_memory(norm, rows, cols);
    if (!ready) scale_rows(x, norm, rows, cols, memory.scaled, memory.squares, queue_);
    return {memory.scaled, memory.squares, x, eps};
  }
  std::uint16_t* rounded = rounded_rows(rows * cols);
  if (norm != nullptr) {
    rms_norm_rows(x, norm, eps, rows, cols, nullptr, rounded, queue_);
  } else if (!ready) {
    to_bfloat16(x, rows * cols, rounded, queue_);
  }
  return {rounded, nullptr, nullptr, 0};
}

std::uint16_t* CudaModelOps::rounded_copy(const float* x, std::int64_t rows, std::int64_t cols) {
  const UseDevice use(gpu());
  ready_ = {x, nullptr, rows};
  return rounded_rows(rows * cols);
}

void CudaModelOps::linear_rounded(Kernel kernel, const WeightMatrix& w, const StreamedRows& x, std::int64_t rows,
                                  float* y, bool add, const float* next_norm) {
  if (kernel == Kernel::kProduct) {
    const std::uint16_t* weights = static_cast<const std::uint16_t*>(w.data);
    if (w.dtype == DType::kInt8) {
      const auto bytes = static_cast<std::size_t>(w.rows * w.cols) * sizeof(std::uint16_t);
      auto* unpacked = static_cast<std::uint16_t*>(scratch(unpacked_, bytes));
      unpack_weights(w, unpacked, queue_);
      weights = unpacked;
    }
    return product_.multiply(weights, x.rounded, rows, w.rows, w.cols, y, add, queue_.stream);
  }
  const StreamedMap map = map_of(w, y);
  if (!add) return stream_linear({&map, 1}, w.cols, x, rows, queue_);
  const bool prepares = next_norm != nullptr && w.rows % kNormPart == 0;
  stream_added(map, w.cols, x, rows, prepares ? norm_memory(next_norm, rows, w.rows) : NextNorm{}, queue_);
  if (prepares) ready_ = {y, next_norm, rows};
}

void CudaModelOps::linear_of(const WeightMatrix& w, const float* x, std::int64_t rows, float* y, bool add,
                             const float* next_norm) {
  check_weights(w, "linear");
  base::require(rows >= 0, "linear: {} rows; accepted: 0 or more", rows);
  if (rows == 0) return forget();
  const UseDevice use(gpu());
  const Kernel kernel = kernel_of(w);
  if (kernel == Kernel::kPlain) {
    forget();
    return plain_linear(w, x, rows, y, add, queue_);
  }
  linear_rounded(kernel, w, rows_for(kernel, x, nullptr, 0, rows, w.cols), rows, y, add, next_norm);
}

void CudaModelOps::linear(const WeightMatrix& w, const float* x, std::int64_t rows, float* y, bool add) {
  linear_of(w, x, rows, y, add, nullptr);
}

void CudaModelOps::add_linear(const WeightMatrix& w, const float* x, std::int64_t rows, float* y,
                              const float* next_norm) {
  linear_of(w, x, rows, y, true, next_norm);
}

void CudaModelOps::norm_linear(const float* x, const float* norm, float eps, std::int64_t rows, float* normed,
                               std::span<const Projection> projections) {
  bool alike = !projections.empty() && projections.size() <= kStreamedMaps;
  for (const Projection& one : projections) alike = alike && same_kernel(one.w, projections.front().w);
  if (!alike || kernel_of(projections.front().w) == Kernel::kPlain)
    return ModelOps::norm_linear(x, norm, eps, rows, normed, projections);
  if (rows == 0) return;
  const UseDevice use(gpu());
  const std::int64_t cols = projections.front().w.cols;
  const Kernel kernel = kernel_of(projections.front().w);
  const StreamedRows normalised = rows_for(kernel, x, norm, eps, rows, cols);
  std::vector<StreamedMap> maps;
  for (const Projection& one : projections) {
    if (kernel == Kernel::kProduct) linear_rounded(kernel, one.w, normalised, rows, one.y, false, nullptr);
    maps.push_back(map_of(one.w, one.y));
  }
  if (kernel == Kernel::kStream) stream_linear(maps, cols, normalised, rows, queue_);
}

bool CudaModelOps::norm_linear_step(const float* x, const float* norm, float eps, std::int64_t rows,
                                    std::span<const Projection> qkv, const StepTarget& target) {
  std::vector<StreamedMap> maps;
  for (const Projection& one : qkv) {
    if (kernel_of(one.w) != Kernel::kStream || !same_kernel(one.w, qkv.front().w)) return false;
    maps.push_back(map_of(one.w, nullptr));
  }
  if (!takes_step(target, rows)) return false;
  const UseDevice use(gpu());
  const std::int64_t cols = qkv.front().w.cols;
  StepTarget turned = target;
  turned.angles = angles();
  stream_step(maps, cols, rows_for(Kernel::kStream, x, norm, eps, rows, cols), rows, turned, queue_);
  return true;
}

// Few results are written by the kernel itself where the host finds them: nothing would hide their copy. More come in
// pieces, each copied while the next one is computed.
const float* CudaModelOps::norm_linear_to_host(const float* x, const float* norm, float eps, std::int64_t rows,
                                               float* normed, const Projection& one) {
  constexpr std::int64_t kMostPieces = 8, kPieceBytes = 1 << 20;
  const UseDevice use(gpu());
  const std::int64_t outputs = one.w.rows, bytes = rows * outputs * static_cast<std::int64_t>(sizeof(float));
  if (results_.bytes() < static_cast<std::size_t>(bytes)) {
    finish();
    ++generation_;  // first: what was recorded is lost even where the rest throws
    results_.resize(static_cast<std::size_t>(bytes));
  }
  auto* const host = reinterpret_cast<float*>(results_.data());
  const std::int64_t pieces = std::clamp<std::int64_t>(bytes / kPieceBytes, 1, kMostPieces);
  const bool streams = kernel_of(one.w) == Kernel::kStream;
  if (pieces == 1 || !streams) {
    const Projection there{one.w, streams ? host : one.y};
    norm_linear(x, norm, eps, rows, normed, {&there, 1});
    if (!streams) device_.copy_out(host, one.y, static_cast<std::size_t>(bytes));
    return host;
  }
  const StreamedRows normalised = rows_for(Kernel::kStream, x, norm, eps, rows, one.w.cols);
  // Tiles for whole rounds of the multiprocessors; what is left over, whose copy nothing hides, comes last.
  const std::int64_t round = 32 * std::int64_t{queue_.multiprocessors};
  const std::int64_t step = std::max<std::int64_t>(outputs / (pieces * round), 1) * round;
  const auto pitch = static_cast<std::size_t>(outputs) * sizeof(float);
  for (std::int64_t first = 0; first < outputs; first += step) {
    const std::int64_t count = std::min(step, outputs - first);
    const StreamedMap map = map_of(one.w, one.y + first, first, count);
    stream_linear({&map, 1}, one.w.cols, normalised, rows, queue_);
    order(queue_.stream, copies_);
    check(cudaMemcpy2DAsync(host + first, pitch, one.y + first, pitch, static_cast<std::size_t>(count) * sizeof(float),
                            static_cast<std::size_t>(rows), cudaMemcpyDeviceToHost, copies_),
          "copy from the GPU");
  }
  order(copies_, queue_.stream);
  return host;
}

void CudaModelOps::feed_forward(const FeedForward& f, std::int64_t rows, float* x) {
  const Kernel gate = kernel_of(f.gate), down = kernel_of(f.down);
  if (!same_kernel(f.gate, f.up) || gate == Kernel::kPlain || down == Kernel::kPlain)
    return ModelOps::feed_forward(f, rows, x);
  if (rows == 0) return;
  const UseDevice use(gpu());
  const std::int64_t cols = f.gate.cols, dim = f.gate.rows;
  auto* activated =
      static_cast<std::uint16_t*>(scratch(activated_, static_cast<std::size_t>(rows * dim) * sizeof(std::uint16_t)));
  const StreamedRows normalised = rows_for(gate, x, f.norm, f.eps, rows, cols);
  if (gate == Kernel::kStream) {
    stream_gated(map_of(f.gate, nullptr), map_of(f.up, nullptr), cols, normalised, rows, activated, queue_);
  } else {
    float* ups = f.gate_up + rows * dim;
    linear_rounded(gate, f.gate, normalised, rows, f.gate_up, false, nullptr);
    linear_rounded(gate, f.up, normalised, rows, ups, false, nullptr);
    swiglu_to_bfloat16(f.gate_up, ups, rows * dim, activated, queue_);
  }
  linear_rounded(down, f.down, {activated, nullptr, nullptr, 0}, rows, x, true, f.next_norm);
}

}  // namespace treeattn::kernels::cuda
