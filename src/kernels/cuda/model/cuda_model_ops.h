// SPDX-License-Identifier: Apache-2.0
// ModelOps on a GPU: memory and passes in cuda_model_ops.cc, linear maps in cuda_linear_ops.cc.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/device_buffer.h"
#include "kernels/cuda/model/linear_kernels.h"
#include "kernels/cuda/model/matrix_product.h"
#include "kernels/cuda/model/pass_tables.h"
#include "kernels/cuda/model/prompt_product.h"
#include "kernels/cuda/model/recording.h"
#include "kernels/cuda/pinned_buffer.h"
#include "kernels/cuda/ranks/rank_device.h"
#include "kernels/model_ops.h"

namespace treeattn::kernels::cuda {

class CudaModelOps final : public ModelOps {
 public:
  explicit CudaModelOps(int gpu);
  ~CudaModelOps() override;
  CudaModelOps(const CudaModelOps&) = delete;
  CudaModelOps& operator=(const CudaModelOps&) = delete;

  std::string_view name() const override { return name_; }
  int gpu() const override { return device_.gpu(); }
  void* stream() const override { return device_.stream(); }

  void* allocate(std::size_t bytes) override;
  void release(void* memory) noexcept override;
  void to_host(void* to, const void* from, std::size_t bytes) override;
  void from_host(void* to, const void* from, std::size_t bytes) override {
    forget();
    device_.copy_in(to, from, bytes);
    device_.finish();
  }

  void embed(const WeightMatrix& table, std::span<const std::int32_t> tokens, float* x) override;
  void rms_norm(const float* x, const float* weight, float eps, std::int64_t rows, std::int64_t dim, float* y) override;
  void linear(const WeightMatrix& w, const float* x, std::int64_t rows, float* y, bool add) override;
  void add_linear(const WeightMatrix& w, const float* x, std::int64_t rows, float* y, const float* next_norm) override;
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
  void recorded(std::span<const std::int64_t> key, const PassRows& rows, const std::function<bool(bool)>& all_ready,
                const std::function<void()>& work) override;
  const float* angles() const override { return angles_.as<float>(); }
  std::uint16_t* rounded_copy(const float* x, std::int64_t rows, std::int64_t cols) override;

 private:
  // How the rows of a matrix are computed in this pass.
  enum class Kernel { kStream, kProduct, kPlain };
  Kernel kernel_of(const WeightMatrix& w) const {
    if (!can_stream(w)) return Kernel::kPlain;
    return is_product(w.dtype, pass_, w.rows, w.cols) ? Kernel::kProduct : Kernel::kStream;
  }
  // Whether one launch may have both.
  bool same_kernel(const WeightMatrix& a, const WeightMatrix& b) const {
    return a.dtype == b.dtype && kernel_of(a) == kernel_of(b);
  }
  // What the call before has left for this one: rows of x in bfloat16, on their way through `norm` or as they are.
  // Whatever else is called first forgets it.
  struct Ready {
    const float* x = nullptr;
    const float* norm = nullptr;
    std::int64_t rows = 0;
    bool operator==(const Ready&) const = default;
  };
  void forget() { ready_ = {}; }
  bool take_ready(const Ready& wanted) { return std::exchange(ready_, {}) == wanted; }

  void linear_rounded(Kernel kernel, const WeightMatrix& w, const StreamedRows& x, std::int64_t rows, float* y,
                      bool add, const float* next_norm);
  void linear_of(const WeightMatrix& w, const float* x, std::int64_t rows, float* y, bool add, const float* next_norm);
  // Rows of x, normalised where norm is not null, as the kernel wants them.
  StreamedRows rows_for(Kernel kernel, const float* x, const float* norm, float eps, std::int64_t rows,
                        std::int64_t cols);
  // Memory for rows that go through a norm on their way into a streamed map.
  NextNorm norm_memory(const float* norm, std::int64_t rows, std::int64_t cols);
  // At least so many bytes, whatever they hold.
  void* scratch(DeviceBuffer& buffer, std::size_t bytes);
  std::uint16_t* rounded_rows(std::int64_t count) {
    return static_cast<std::uint16_t*>(scratch(rounded_, static_cast<std::size_t>(count) * sizeof(std::uint16_t)));
  }
  bool is_begun(std::span<const std::int32_t> tokens) const {
    return begun_ && std::equal(tokens.begin(), tokens.end(), tokens_.begin(), tokens_.end());
  }
  void send_tables(const PassRows& rows, bool put);
  void record(const std::function<void()>& work);
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
  DeviceBuffer frequencies_there_, angles_, rounded_, normalised_, squares_, activated_, unpacked_;
  std::int64_t generation_ = 0;  // of these buffers: what was recorded holds their addresses
  Ready ready_;
  std::vector<std::int64_t> seen_;
  Recording recording_;
};

}  // namespace treeattn::kernels::cuda
