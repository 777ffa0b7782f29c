// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/cuda/burst_kernels.h"
#include "kernels/cuda/device_buffer.h"
#include "kernels/cuda/gpu_meter.h"
#include "kernels/cuda/ranks/row_kernels.h"

namespace treeattn::kernels::cuda {

struct GpuMeter::Impl {
  explicit Impl(RankDevice& rank_device) : device(rank_device), stream(static_cast<cudaStream_t>(device.stream())) {
    const UseDevice use(device.gpu());
    sink = DeviceBuffer(sizeof(unsigned));
    check(cudaEventCreate(&begin), "event");
    check(cudaEventCreate(&end), "event");
  }
  ~Impl() {
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
  }

  RankDevice& device;
  cudaStream_t stream;
  DeviceBuffer sink;
  cudaEvent_t begin = nullptr, end = nullptr;
};

GpuMeter::GpuMeter(RankDevice& device) : impl_(std::make_unique<Impl>(device)) {}
GpuMeter::~GpuMeter() = default;

double GpuMeter::milliseconds(const std::function<void()>& work) {
  const UseDevice use(impl_->device.gpu());
  check(cudaEventRecord(impl_->begin, impl_->stream), "event");
  work();
  check(cudaEventRecord(impl_->end, impl_->stream), "event");
  check(cudaEventSynchronize(impl_->end), "work on the GPU");
  float out = 0;
  check(cudaEventElapsedTime(&out, impl_->begin, impl_->end), "time on the GPU");
  return static_cast<double>(out);
}

void GpuMeter::read(const void* from, std::size_t bytes) {
  const UseDevice use(impl_->device.gpu());
  read_all(from, bytes, impl_->sink.as<unsigned>(), impl_->stream);
}

double GpuMeter::multiply_add_gflops(DType type) {
  constexpr int kRepeats = 5;
  const UseDevice use(impl_->device.gpu());
  int multiprocessors = 0;
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, impl_->device.gpu()), "GPU");
  double best = 0;
  for (int i = 0; i <= kRepeats; ++i) {  // the first warms up
    double operations = 0;
    const double ms = milliseconds(
        [&] { operations = multiply_add_burst(type, multiprocessors, impl_->sink.as<float>(), impl_->stream); });
    if (i > 0) best = std::max(best, 1e-6 * operations / ms);
  }
  return best;
}

}  // namespace treeattn::kernels::cuda
