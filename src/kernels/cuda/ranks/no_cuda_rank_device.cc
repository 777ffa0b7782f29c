// SPDX-License-Identifier: Apache-2.0
// In place of the CUDA files in a build without them: the constructors throw, so nothing else is ever called.
#include <string>

#include "kernels/cuda/ranks/rank_device.h"
#include "treeattn/cuda.h"
#include "treeattn/error.h"

namespace treeattn::kernels::cuda {

DeviceArray::DeviceArray(int, std::size_t) { throw Unavailable(cuda_problem()); }
DeviceArray::~DeviceArray() = default;
void DeviceArray::swap(DeviceArray&) noexcept {}
void DeviceArray::grow(std::size_t) {}

void start_copy(void*, const void*, std::size_t) {}
void start_copy_on(int, void*, const void*, std::size_t) {}
void finish_copies() {}
void stay_on_gpu(int) {}

struct RankDevice::Impl {};

RankDevice::RankDevice(int gpu) { throw Unavailable("GPU " + std::to_string(gpu) + ": " + cuda_problem()); }
RankDevice::~RankDevice() = default;
int RankDevice::gpu() const { return 0; }
std::int64_t RankDevice::slot() const { return 0; }
std::string RankDevice::kernels() const { return {}; }
void* RankDevice::stream() const { return nullptr; }
std::size_t RankDevice::memory_bytes() const { return 0; }
void RankDevice::copy_in(void*, const void*, std::size_t) {}
void RankDevice::copy_out(void*, const void*, std::size_t) {}
void RankDevice::fetch(void*, const void*, std::size_t) {}
void RankDevice::copy(void*, const void*, std::size_t) {}
void RankDevice::fill_zero(void*, std::size_t) {}
void RankDevice::finish() {}
void RankDevice::wait_for(void*) {}
void RankDevice::hold_up(void*) {}
void RankDevice::store_rows(const KvView&, std::int64_t, std::int64_t, DType, std::byte*, float*) {}
float* RankDevice::attend(const Problem&) { return nullptr; }
void RankDevice::attend(const Problem&, float*) {}
void RankDevice::attend_into(const Problem&, float*, bool) {}
void RankDevice::finalize(const float*, std::size_t, std::int64_t, float*) {}
void RankDevice::attend_on_device(const Problem&, float*) {}
void* RankDevice::step_queries(std::size_t) { return nullptr; }
std::vector<std::int64_t> RankDevice::prepare_step(const Problem&, void*) { return {}; }
void RankDevice::send_step(void*) {}
StepTarget RankDevice::step_target(const KvView&, const KvView&) const { return {}; }
void RankDevice::store_step(const StepTarget&, const StepRows&, void*) {}
void RankDevice::attend_step(const KvView&, const KvView&, float*, std::uint16_t*, void*) {}
void RankDevice::attend_step_into(const KvView&, const KvView&, float*, void*) {}
std::string_view RankDevice::kernel() const { return {}; }
double RankDevice::read_bandwidth(std::size_t) { return 0; }
double RankDevice::product_rate(std::int64_t) { return 0; }

}  // namespace treeattn::kernels::cuda
