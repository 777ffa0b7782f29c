// SPDX-License-Identifier: Apache-2.0
// ModelOps on a GPU: checks, memory, and which kernel serves which matrix.
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "base/check.h"
#include "kernels/cuda/device_buffer.h"
#include "kernels/cuda/model/linear_kernels.h"
#include "kernels/cuda/model/matrix_product.h"
#include "kernels/cuda/model/model_kernels.h"
#include "kernels/cuda/ranks/node_plan.h"
#include "kernels/cuda/ranks/rank_device.h"
#include "kernels/cuda/ranks/row_kernels.h"
#include "kernels/model_ops.h"
#include "treeattn/error.h"

namespace treeattn::kernels {
namespace cuda {
namespace {

// A decode step that was recorded.
class Recording {
 public:
  ~Recording() {
    if (graph_ != nullptr) cudaGraphExecDestroy(graph_);
  }
  Recording() = default;
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  bool is(const std::vector<std::int64_t>& key) const { return graph_ != nullptr && key == key_; }

  void record(const std::vector<std::int64_t>& key, cudaStream_t stream, const std::function<void()>& work) {
    if (graph_ != nullptr) cudaGraphExecDestroy(graph_);
    graph_ = nullptr;
    cudaGraph_t recorded = nullptr;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "recording");
    try {
      work();
    } catch (...) {
      cudaStreamEndCapture(stream, &recorded);
      if (recorded != nullptr) cudaGraphDestroy(recorded);
      cudaGetLastError();
      throw;
    }
    check(cudaStreamEndCapture(stream, &recorded), "recording");
    const cudaError_t error = cudaGraphInstantiate(&graph_, recorded, 0);
    cudaGraphDestroy(recorded);
    check(error, "recording");
    key_ = key;
  }

  void play(cudaStream_t stream) { check(cudaGraphLaunch(graph_, stream), "recorded work"); }

 private:
  cudaGraphExec_t graph_ = nullptr;
  std::vector<std::int64_t> key_;
};

// What a pass has in the host's memory, and its copy on the GPU: tokens, positions.
class PassTables {
 public:
  // Room for so many rows. True where the memory is another now.
  bool reserve(std::size_t rows, cudaStream_t stream) {
    if (rows <= rows_) return false;
    check(cudaStreamSynchronize(stream), "last pass");
    rows_ = rows + rows / 4;
    host_.resize(bytes());
    device_ = DeviceBuffer(bytes());
    return true;
  }
  void put(const PassRows& rows) {
    std::memcpy(host_.data(), rows.positions.data(), rows.positions.size_bytes());
    std::memcpy(host_.data() + rows_ * sizeof(std::int64_t), rows.tokens.data(), rows.tokens.size_bytes());
  }
  void send(cudaStream_t stream) {
    check(cudaMemcpyAsync(device_.as<void>(), host_.data(), bytes(), cudaMemcpyHostToDevice, stream), "copy of tokens");
  }
  const std::int64_t* positions() const { return device_.as<std::int64_t>(); }
  const std::int32_t* tokens() const {
    return reinterpret_cast<const std::int32_t*>(device_.as<std::byte>() + rows_ * sizeof(std::int64_t));
  }

 private:
  std::size_t bytes() const { return rows_ * (sizeof(std::int64_t) + sizeof(std::int32_t)); }
  std::size_t rows_ = 0;
  PinnedBuffer host_;
  DeviceBuffer device_;
};

class CudaModelOps final : public ModelOps {
 public:
  explicit CudaModelOps(int gpu) : device_(gpu), name_(fmt::format("cuda:{}", gpu)), product_(gpu) {
    int major = 0;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, gpu), "attribute of the GPU");
    check(cudaDeviceGetAttribute(&queue_.multiprocessors, cudaDevAttrMultiProcessorCount, gpu), "attribute of the GPU");
    queue_.stream = static_cast<cudaStream_t>(device_.stream());
    queue_.overlaps = major >= 9;
    const UseDevice use(gpu);
    check(cudaStreamCreateWithFlags(&copies_, cudaStreamNonBlocking), "stream");
    check(cudaEventCreateWithFlags(&reached_, cudaEventDisableTiming), "event");
  }
  ~CudaModelOps() override {
    cudaEventDestroy(reached_);
    cudaStreamDestroy(copies_);
  }

  std::string_view name() const override { return name_; }
  int gpu() const override { return device_.gpu(); }
  void* stream() const override { return device_.stream(); }

  void* allocate(std::size_t bytes) override;
  void release(void* memory) noexcept override;
  void to_host(void* to, const void* from, std::size_t bytes) override;
  void from_host(void* to, const void* from, std::size_t bytes) override {
    device_.copy_in(to, from, bytes);
    device_.finish();
  }

  void embed(const WeightMatrix& table, std::span<const std::int32_t> tokens, float* x) override;
  void rms_norm(const float* x, const float* weight, float eps, std::int64_t rows, std::int64_t dim, float* y) override;
  void linear(const WeightMatrix& w, const float* x, std::int64_t rows, float* y, bool add) override;
  void rope(float* x, std::int64_t rows, std::int64_t heads, std::int64_t dim, std::span<const std::int64_t> positions,
            std::span<const double> frequencies) override;
  void swiglu(const float* gate_up, std::int64_t rows, std::int64_t dim, float* y) override;

  void begin(const PassRows& rows) override;
  void norm_linear(const float* x, const float* norm, float eps, std::int64_t rows, float* normed,
                   std::span<const Projection> projections) override;
  bool norm_linear_step(const float* x, const float* norm, float eps, std::int64_t rows,
                        std::span<const Projection> qkv, const StepTarget& target) override;
  const float* norm_linear_to_host(const float* x, const float* norm, float eps, std::int64_t rows, float* normed,
                                   const Projection& one) override;
  void finish() override { device_.finish(); }
  void feed_forward(const FeedForward& f, std::int64_t rows, float* x) override;
  void recorded(std::span<const std::int64_t> key, const PassRows& rows, const std::function<void()>& work) override;
  const float* angles() const override { return angles_.as<float>(); }

 private:
  // How the rows of a matrix are computed in this pass.
  enum class Kernel { kStream, kProduct, kPlain };
  Kernel kernel_of(const WeightMatrix& w) const {
    if (!can_stream(w)) return Kernel::kPlain;
    return pass_ == Pass::kPrefill && w.rows % 8 == 0 ? Kernel::kProduct : Kernel::kStream;
  }
  void linear_bf16(Kernel kernel, const WeightMatrix& w, const StreamedRows& x, std::int64_t rows, float* y, bool add);
  // Rows of x, normalised where norm is not null, as the kernel wants them.
  StreamedRows rows_for(Kernel kernel, const float* x, const float* norm, float eps, std::int64_t rows,
                        std::int64_t cols);
  // At least so many bytes, whatever they hold.
  void* scratch(DeviceBuffer& buffer, std::size_t bytes);
  std::uint16_t* rounded_rows(std::int64_t count) {
    return static_cast<std::uint16_t*>(scratch(rounded_, static_cast<std::size_t>(count) * sizeof(std::uint16_t)));
  }
  bool is_begun(std::span<const std::int32_t> tokens) const {
    return begun_ && std::equal(tokens.begin(), tokens.end(), tokens_.begin(), tokens_.end());
  }
  void send_tables(const PassRows& rows, bool put);
  // What is put on `later` from now on comes after what is on `earlier`.
  void order(cudaStream_t earlier, cudaStream_t later) {
    check(cudaEventRecord(reached_, earlier), "event");
    check(cudaStreamWaitEvent(later, reached_, 0), "event");
  }
  void fill_angles(std::span<const std::int64_t> positions, std::span<const double> frequencies);

  RankDevice device_;  // for its stream and copies
  std::string name_;
  Queue queue_;
  MatrixProduct product_;
  Pass pass_ = Pass::kDecode;
  PassTables tables_;
  PinnedBuffer staging_, results_;
  cudaStream_t copies_ = nullptr;  // beside the work
  cudaEvent_t reached_ = nullptr;
  bool begun_ = false, playing_ = false;
  std::vector<std::int32_t> tokens_;     // of the pass
  std::vector<std::int64_t> positions_;  // that angles_ are of
  std::vector<double> frequencies_;      // the same
  DeviceBuffer frequencies_there_, angles_, rounded_, activated_, quantised_, scales_;
  std::int64_t generation_ = 0;  // of these buffers: what was recorded holds their addresses
  std::vector<std::int64_t> seen_;
  Recording recording_;
};

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
    if (tables_.reserve(std::max(rows.tokens.size(), rows.positions.size()), queue_.stream)) ++generation_;
    tables_.put(rows);
  }
  tables_.send(queue_.stream);
}

void CudaModelOps::embed(const WeightMatrix& table, std::span<const std::int32_t> tokens, float* x) {
  check_weights(table, "embed");
  for (const std::int32_t token : tokens) {
    base::require(token >= 0 && token < table.rows, "embed: token {}; accepted: 0 to {}", token, table.rows - 1);
  }
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
  const UseDevice use(gpu());
  rms_norm_rows(x, weight, eps, rows, dim, y, nullptr, queue_);
}

StreamedRows CudaModelOps::rows_for(Kernel kernel, const float* x, const float* norm, float eps, std::int64_t rows,
                                    std::int64_t cols) {
  if (kernel == Kernel::kStream && takes_floats(rows, cols)) return {nullptr, x, norm, eps};
  std::uint16_t* rounded = rounded_rows(rows * cols);
  if (norm != nullptr) {
    rms_norm_rows(x, norm, eps, rows, cols, nullptr, rounded, queue_);
  } else {
    to_bfloat16(x, rows * cols, rounded, queue_);
  }
  return {rounded, nullptr, nullptr, 0};
}

void CudaModelOps::linear_bf16(Kernel kernel, const WeightMatrix& w, const StreamedRows& x, std::int64_t rows, float* y,
                               bool add) {
  const auto* weights = static_cast<const std::uint16_t*>(w.data);
  if (kernel == Kernel::kProduct) {
    return product_.multiply(weights, x.rounded, rows, w.rows, w.cols, y, add, queue_.stream);
  }
  const StreamedMap map{weights, y, w.rows};
  stream_linear({&map, 1}, w.cols, x, rows, add, queue_);
}

void CudaModelOps::linear(const WeightMatrix& w, const float* x, std::int64_t rows, float* y, bool add) {
  check_weights(w, "linear");
  base::require(rows >= 0, "linear: {} rows; accepted: 0 or more", rows);
  if (rows == 0) return;
  const UseDevice use(gpu());
  if (w.dtype == DType::kInt8) {
    RowConversion conversion;
    conversion.from = reinterpret_cast<const std::byte*>(x);
    conversion.heads = static_cast<int>(w.cols / w.group);
    conversion.dim = static_cast<int>(w.group);
    conversion.token_stride = w.cols;
    conversion.head_stride = w.group;
    conversion.tokens = rows;
    conversion.to_type = DType::kInt8;
    conversion.to = static_cast<std::byte*>(scratch(quantised_, static_cast<std::size_t>(rows * w.cols)));
    conversion.to_scales =
        static_cast<float*>(scratch(scales_, static_cast<std::size_t>(rows * conversion.heads) * sizeof(float)));
    convert_rows(conversion, queue_.stream);
    return plain_linear_int8(w, reinterpret_cast<const std::int8_t*>(conversion.to), conversion.to_scales, rows, y, add,
                             queue_);
  }
  const Kernel kernel = kernel_of(w);
  if (kernel == Kernel::kPlain) return plain_linear(w, x, rows, y, add, queue_);
  linear_bf16(kernel, w, rows_for(kernel, x, nullptr, 0, rows, w.cols), rows, y, add);
}

void CudaModelOps::norm_linear(const float* x, const float* norm, float eps, std::int64_t rows, float* normed,
                               std::span<const Projection> projections) {
  bool alike = !projections.empty() && projections.size() <= kStreamedMaps;
  for (const Projection& one : projections) alike = alike && kernel_of(one.w) == kernel_of(projections.front().w);
  if (!alike || kernel_of(projections.front().w) == Kernel::kPlain)
    return ModelOps::norm_linear(x, norm, eps, rows, normed, projections);
  if (rows == 0) return;
  const UseDevice use(gpu());
  const std::int64_t cols = projections.front().w.cols;
  const Kernel kernel = kernel_of(projections.front().w);
  const StreamedRows normalised = rows_for(kernel, x, norm, eps, rows, cols);
  std::vector<StreamedMap> maps;
  for (const Projection& one : projections) {
    if (kernel == Kernel::kProduct) linear_bf16(kernel, one.w, normalised, rows, one.y, false);
    maps.push_back({static_cast<const std::uint16_t*>(one.w.data), one.y, one.w.rows});
  }
  if (kernel == Kernel::kStream) stream_linear(maps, cols, normalised, rows, false, queue_);
}

bool CudaModelOps::norm_linear_step(const float* x, const float* norm, float eps, std::int64_t rows,
                                    std::span<const Projection> qkv, const StepTarget& target) {
  std::vector<StreamedMap> maps;
  for (const Projection& one : qkv) {
    if (kernel_of(one.w) != Kernel::kStream) return false;
    maps.push_back({static_cast<const std::uint16_t*>(one.w.data), nullptr, one.w.rows});
  }
  if (!takes_step(target, rows)) return false;
  const UseDevice use(gpu());
  const std::int64_t cols = qkv.front().w.cols;
  StepTarget turned = target;
  turned.angles = angles();
  stream_step(maps, cols, rows_for(Kernel::kStream, x, norm, eps, rows, cols), rows, turned, queue_);
  return true;
}

// In pieces: a piece is copied while the next one is computed.
const float* CudaModelOps::norm_linear_to_host(const float* x, const float* norm, float eps, std::int64_t rows,
                                               float* normed, const Projection& one) {
  constexpr std::int64_t kMostPieces = 4, kPieceBytes = 2 << 20;
  const UseDevice use(gpu());
  const std::int64_t outputs = one.w.rows, bytes = rows * outputs * static_cast<std::int64_t>(sizeof(float));
  if (results_.bytes() < static_cast<std::size_t>(bytes)) {
    finish();
    results_.resize(static_cast<std::size_t>(bytes));
    ++generation_;
  }
  auto* const host = reinterpret_cast<float*>(results_.data());
  const std::int64_t pieces = std::clamp<std::int64_t>(bytes / kPieceBytes, 1, kMostPieces);
  if (pieces == 1 || kernel_of(one.w) != Kernel::kStream) {
    norm_linear(x, norm, eps, rows, normed, {&one, 1});
    device_.copy_out(host, one.y, static_cast<std::size_t>(bytes));
    return host;
  }
  const StreamedRows normalised = rows_for(Kernel::kStream, x, norm, eps, rows, one.w.cols);
  const std::int64_t step = (outputs + pieces - 1) / pieces;
  const auto pitch = static_cast<std::size_t>(outputs) * sizeof(float);
  for (std::int64_t first = 0; first < outputs; first += step) {
    const std::int64_t count = std::min(step, outputs - first);
    const StreamedMap map{static_cast<const std::uint16_t*>(one.w.data) + first * one.w.cols, one.y + first, count,
                          outputs};
    stream_linear({&map, 1}, one.w.cols, normalised, rows, false, queue_);
    order(queue_.stream, copies_);
    check(cudaMemcpy2DAsync(host + first, pitch, one.y + first, pitch, static_cast<std::size_t>(count) * sizeof(float),
                            static_cast<std::size_t>(rows), cudaMemcpyDeviceToHost, copies_),
          "copy from the GPU");
  }
  order(copies_, queue_.stream);
  return host;
}

void CudaModelOps::feed_forward(const FeedForward& f, std::int64_t rows, float* x) {
  const Kernel gate = kernel_of(f.gate), up = kernel_of(f.up), down = kernel_of(f.down);
  if (gate != up || gate == Kernel::kPlain || down == Kernel::kPlain) return ModelOps::feed_forward(f, rows, x);
  if (rows == 0) return;
  const UseDevice use(gpu());
  const std::int64_t cols = f.gate.cols, dim = f.gate.rows;
  auto* activated =
      static_cast<std::uint16_t*>(scratch(activated_, static_cast<std::size_t>(rows * dim) * sizeof(std::uint16_t)));
  const StreamedRows normalised = rows_for(gate, x, f.norm, f.eps, rows, cols);
  if (gate == Kernel::kStream) {
    stream_gated(static_cast<const std::uint16_t*>(f.gate.data), static_cast<const std::uint16_t*>(f.up.data), dim,
                 cols, normalised, rows, activated, queue_);
  } else {
    float* ups = f.gate_up + rows * dim;
    linear_bf16(gate, f.gate, normalised, rows, f.gate_up, false);
    linear_bf16(up, f.up, normalised, rows, ups, false);
    swiglu_to_bfloat16(f.gate_up, ups, rows * dim, activated, queue_);
  }
  linear_bf16(down, f.down, {activated, nullptr, nullptr, 0}, rows, x, true);
}

void CudaModelOps::fill_angles(std::span<const std::int64_t> positions, std::span<const double> frequencies) {
  const std::size_t half = frequencies.size();
  if (!std::equal(frequencies.begin(), frequencies.end(), frequencies_.begin(), frequencies_.end())) {
    frequencies_.assign(frequencies.begin(), frequencies.end());
    scratch(frequencies_there_, half * sizeof(double));
    device_.copy_in(frequencies_there_.as<void>(), frequencies_.data(), half * sizeof(double));
    device_.finish();
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
  const UseDevice use(gpu());
  swiglu_rows(gate_up, rows, dim, y, queue_);
}

void CudaModelOps::begin(const PassRows& rows) {
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
                            const std::function<void()>& work) {
  const UseDevice use(gpu());
  const auto whole = [&] {
    std::vector<std::int64_t> out(key.begin(), key.end());
    out.push_back(static_cast<std::int64_t>(rows.tokens.size()));
    out.push_back(generation_);
    return out;
  };
  if (whole() != seen_) {
    work();
    seen_ = whole();  // with the generation that the work has left behind
    return;
  }
  check(cudaStreamSynchronize(queue_.stream), "last pass");
  tables_.put(rows);
  if (!recording_.is(seen_)) {
    playing_ = true;
    try {
      recording_.record(seen_, queue_.stream, work);
    } catch (...) {
      playing_ = false;
      throw;
    }
    playing_ = false;
  }
  // As begin() leaves it, for calls that come after.
  pass_ = rows.pass;
  tokens_.assign(rows.tokens.begin(), rows.tokens.end());
  positions_.assign(rows.positions.begin(), rows.positions.end());
  begun_ = true;
  recording_.play(queue_.stream);
}

}  // namespace
}  // namespace cuda

std::unique_ptr<ModelOps> cuda_model_ops(int gpu) { return std::make_unique<cuda::CudaModelOps>(gpu); }

}  // namespace treeattn::kernels
