// SPDX-License-Identifier: Apache-2.0
// In place of the CUDA files in a build without them: the constructor throws, so nothing else is ever called.
#include "kernels/cuda/gpu_meter.h"
#include "treeattn/cuda.h"
#include "treeattn/error.h"

namespace treeattn::kernels::cuda {

struct GpuMeter::Impl {};

GpuMeter::GpuMeter(RankDevice&) { throw Unavailable(cuda_problem()); }
GpuMeter::~GpuMeter() = default;
double GpuMeter::milliseconds(const std::function<void()>&) { return 0; }
void GpuMeter::read(const void*, std::size_t) {}
double GpuMeter::multiply_add_gflops(DType) { return 0; }

}  // namespace treeattn::kernels::cuda
