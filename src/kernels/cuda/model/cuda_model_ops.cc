// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/model/cuda_model_ops.h"

#include <fmt/format.h>

#include <cstring>

#include "base/check.h"
#include "kernels/cuda/model/model_kernels.h"
#include "treeattn/error.h"

namespace treeattn::kernels {
namespace cuda {

CudaModelOps::CudaModelOps(int gpu) : device_(gpu), name_(fmt::format("cuda:{}", gpu)), product_(gpu) {
  check(cudaDeviceGetAttribute(&queue_.multiprocessors, cudaDevAttrMultiProcessorCount, gpu), "attribute of the GPU");
  queue_.stream = static_cast<cudaStream_t>(device_.stream());
  const UseDevice use(gpu);
  queue_.overlaps = code_is_for_hopper();
  check(cudaStreamCreateWithFlags(&copies_, cudaStreamNonBlocking), "stream");
  check(cudaEventCreateWithFlags(&reached_, cudaEventDisableTiming), "event");
}

CudaModelOps::~CudaModelOps() {
  cudaEventDestroy(reached_);
  cudaStreamDestroy(copies_);
}

void* CudaModelOps::allocate(std::size_t bytes) {
  const UseDevice use(gpu());
  void* memory = nullptr;
  const cudaError_t error = cudaMalloc(&memory, std::max<std::size_t>(bytes, 1));
  if (error != cudaSuccess) {
    cudaGetLastError();
    throw Unavailable(fmt::format("{}: no memory for {} bytes", name_, bytes));
  }
  return memory;
}

void CudaModelOps::release(void* memory) noexcept {
  int before = 0;
  cudaGetDevice(&before);
  cudaSetDevice(gpu());
  cudaFree(memory);
  cudaSetDevice(before);
}

// By way of pinned memory, to which the GPU copies without the driver's help; not for what would take much of it.
void CudaModelOps::to_host(void* to, const void* from, std::size_t bytes) {
  constexpr std::size_t kMost = std::size_t{16} << 20;
  if (bytes == 0) return;
  if (bytes > kMost) {
    device_.copy_out(to, from, bytes);
    return device_.finish();
  }
  const UseDevice use(gpu());
  if (staging_.bytes() < bytes) staging_.resize(bytes);
  device_.copy_out(staging_.data(), from, bytes);
  device_.finish();
  std::memcpy(to, staging_.data(), bytes);
}

void* CudaModelOps::scratch(DeviceBuffer& buffer, std::size_t bytes) {
  if (buffer.bytes() < bytes) {
    check(cudaStreamSynchronize(queue_.stream), "last call");
    buffer = DeviceBuffer(bytes);
    ++generation_;
  }
  return buffer.as<void>();
}

void CudaModelOps::send_tables(const PassRows& rows, bool put) {
  if (put) {
    // The host's side of the last copy must have been read.
    check(cudaStreamSynchronize(queue_.stream), "last pass");
    const std::size_t wanted = std::max(rows.tokens.size(), rows.positions.size());
    if (!tables_.has_room(wanted)) {
      ++generation_;  // first: what was recorded is lost even where the rest throws
      tables_.grow(wanted, queue_.stream);
    }
    tables_.put(rows);
  }
  tables_.send(queue_.stream);
}

void CudaModelOps::embed(const WeightMatrix& table, std::span<const std::int32_t> tokens, float* x) {
  check_weights(table, "embed");
  for (const std::int32_t token : tokens) {
    base::require(token >= 0 && token < table.rows, "embed: token {}; accepted: 0 to {}", token, table.rows - 1);
  }
  forget();
  if (tokens.empty()) return;
  const UseDevice use(gpu());
  if (!is_begun(tokens)) {
    begun_ = false;
    positions_.clear();
    send_tables({pass_, tokens, {}, {}}, true);
  }
  embed_rows(table, tables_.tokens(), static_cast<std::int64_t>(tokens.size()), x, queue_);
}

void CudaModelOps::rms_norm(const float* x, const float* weight, float eps, std::int64_t rows, std::int64_t dim,
                            float* y) {
  base::require(rows >= 0 && dim >= 1, "rms_norm: [{}, {}]; accepted: 0 or more rows of 1 or more", rows, dim);
  forget();
  const UseDevice use(gpu());
  rms_norm_rows(x, weight, eps, rows, dim, y, nullptr, queue_);
}

void CudaModelOps::fill_angles(std::span<const std::int64_t> positions, std::span<const double> frequencies) {
  const std::size_t half = frequencies.size();
  if (!std::equal(frequencies.begin(), frequencies.end(), frequencies_.begin(), frequencies_.end())) {
    ++generation_;  // what was recorded is of others
    frequencies_.clear();
    scratch(frequencies_there_, half * sizeof(double));
    device_.copy_in(frequencies_there_.as<void>(), frequencies.data(), half * sizeof(double));
    device_.finish();
    frequencies_.assign(frequencies.begin(), frequencies.end());
  }
  scratch(angles_, positions.size() * 2 * half * sizeof(float));
  cuda::fill_angles(tables_.positions(), frequencies_there_.as<double>(), static_cast<std::int64_t>(positions.size()),
                    static_cast<std::int64_t>(half), angles_.as<float>(), queue_);
  positions_.assign(positions.begin(), positions.end());
}

void CudaModelOps::rope(float* x, std::int64_t rows, std::int64_t heads, std::int64_t dim,
                        std::span<const std::int64_t> positions, std::span<const double> frequencies) {
  base::require(rows >= 0 && heads >= 1 && dim >= 2 && dim % 2 == 0,
                "rope: {} rows of {} heads of {}; accepted: 0 or more rows, 1 or more heads, an even head size", rows,
                heads, dim);
  base::require(static_cast<std::int64_t>(positions.size()) == rows, "rope: {} positions for {} rows; accepted: {}",
                positions.size(), rows, rows);
  base::require(static_cast<std::int64_t>(frequencies.size()) == dim / 2,
                "rope: {} frequencies for heads of {}; accepted: {}", frequencies.size(), dim, dim / 2);
  forget();
  if (rows == 0) return;
  const UseDevice use(gpu());
  const bool same = std::equal(positions.begin(), positions.end(), positions_.begin(), positions_.end()) &&
                    std::equal(frequencies.begin(), frequencies.end(), frequencies_.begin(), frequencies_.end());
  if (!same) {
    begun_ = false;
    send_tables({pass_, {}, positions, frequencies}, true);
    fill_angles(positions, frequencies);
  }
  rope_rows(x, rows, heads, dim / 2, angles_.as<float>(), queue_);
}

void CudaModelOps::swiglu(const float* gate_up, std::int64_t rows, std::int64_t dim, float* y) {
  base::require(rows >= 0 && dim >= 1, "swiglu: [{}, {}]; accepted: 0 or more rows of 1 or more", rows, dim);
  forget();
  const UseDevice use(gpu());
  swiglu_rows(gate_up, rows, dim, y, queue_);
}

void CudaModelOps::begin(const PassRows& rows) {
  forget();
  pass_ = rows.pass;
  tokens_.assign(rows.tokens.begin(), rows.tokens.end());
  begun_ = true;
  if (rows.tokens.empty()) return;
  const UseDevice use(gpu());
  send_tables(rows, !playing_);
  fill_angles(rows.positions, rows.frequencies);
}

// The first time a key is seen its work is done as it is, and allocates what it needs; the second time it is recorded.
void CudaModelOps::recorded(std::span<const std::int64_t> key, const PassRows& rows,
                            const std::function<bool(bool)>& all_ready, const std::function<void()>& work) {
  const UseDevice use(gpu());
  const auto whole = [&] {
    std::vector<std::int64_t> out(key.begin(), key.end());
    out.push_back(static_cast<std::int64_t>(rows.tokens.size()));
    out.push_back(generation_);
    return out;
  };
  const bool seen = whole() == seen_;
  if (seen) record(work);
  if (!all_ready(seen)) {
    work();
    seen_ = whole();  // with the generation that the work has left behind
    return;
  }
  tables_.put(rows);
  // As the work leaves it, for calls that come after.
  forget();
  pass_ = rows.pass;
  tokens_.assign(rows.tokens.begin(), rows.tokens.end());
  positions_.assign(rows.positions.begin(), rows.positions.end());
  begun_ = true;
  recording_.play(queue_.stream);
}

// What was seen, unless it is there. Nothing of the last pass is under way any more.
void CudaModelOps::record(const std::function<void()>& work) {
  check(cudaStreamSynchronize(queue_.stream), "last pass");
  if (recording_.is(seen_)) return;
  playing_ = true;
  try {
    recording_.record(seen_, queue_.stream, work);
  } catch (...) {
    playing_ = false;
    throw;
  }
  playing_ = false;
}

}  // namespace cuda

std::unique_ptr<ModelOps> cuda_model_ops(int gpu) { return std::make_unique<cuda::CudaModelOps>(gpu); }

}  // namespace treeattn::kernels
