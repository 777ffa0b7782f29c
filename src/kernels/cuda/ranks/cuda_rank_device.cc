// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "kernels/cuda/model/matrix_product.h"
#include "kernels/cuda/model/step_kernels.h"
#include "kernels/cuda/ranks/node_plan.h"
#include "kernels/cuda/ranks/rank_device.h"
#include "kernels/cuda/ranks/row_kernels.h"
#include "kernels/cuda/ranks/state_kernels.h"
#include "treeattn/error.h"
#include "treeattn/state.h"

namespace treeattn::kernels::cuda {
namespace {

// cudaGetDeviceProperties takes milliseconds; these do not.
int attribute(cudaDeviceAttr which, int gpu) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, gpu), "attribute of the GPU");
  return value;
}

int checked(int gpu) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    cudaGetLastError();
    throw Unavailable(
        fmt::format("GPU {}: {}", gpu, error == cudaSuccess ? "the driver lists none" : cudaGetErrorString(error)));
  }
  if (gpu < 0 || gpu >= count) throw Unavailable(fmt::format("GPU {}; accepted: 0 to {}", gpu, count - 1));
  return gpu;
}

// The best of three, after one to warm up.
template <class Work>
double best_seconds(cudaStream_t stream, const Work& work) {
  cudaEvent_t begin = nullptr, end = nullptr;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  float best = 0;
  for (int i = 0; i < 4; ++i) {
    check(cudaEventRecord(begin, stream), "event");
    work();
    check(cudaEventRecord(end, stream), "event");
    check(cudaEventSynchronize(end), "measured work");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin, end), "time of measured work");
    if (i > 0 && (best == 0 || milliseconds < best)) best = milliseconds;
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return static_cast<double>(best) * 1e-3;
}

cudaStream_t as_stream(void* stream) { return static_cast<cudaStream_t>(stream); }

}  // namespace

struct RankDevice::Impl {
  explicit Impl(int index) : gpu(checked(index)) {
    const UseDevice use(gpu);
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "event");
    std::size_t free = 0;
    check(cudaMemGetInfo(&free, &memory), "size of GPU memory");
    const int multiprocessors = attribute(cudaDevAttrMultiProcessorCount, gpu);
    plan = std::make_unique<NodePlan>(multiprocessors, stream);
    steps = std::make_unique<NodePlan>(multiprocessors, stream);
    overlaps = code_is_for_hopper();
  }

  int gpu;
  cudaStream_t stream = nullptr;
  cudaEvent_t event = nullptr;
  std::size_t memory = 0;
  std::unique_ptr<NodePlan> plan, steps;
  PinnedBuffer result;
  bool overlaps = false;  // kernels may be started early
  bool stepped = false;   // whether the last call was a step
};

void stay_on_gpu(int gpu) {
  if (gpu >= 0) check(cudaSetDevice(checked(gpu)), "choice of the GPU");
}

RankDevice::RankDevice(int gpu) : impl_(std::make_unique<Impl>(gpu)) {}

RankDevice::~RankDevice() {
  int before = 0;
  cudaGetDevice(&before);
  cudaSetDevice(impl_->gpu);
  cudaStreamSynchronize(impl_->stream);
  impl_->plan.reset();
  impl_->steps.reset();
  cudaEventDestroy(impl_->event);
  cudaStreamDestroy(impl_->stream);
  cudaSetDevice(before);
}

int RankDevice::gpu() const { return impl_->gpu; }
std::int64_t RankDevice::slot() const {
  const std::int64_t domain = attribute(cudaDevAttrPciDomainId, impl_->gpu);
  return (domain << 16 | attribute(cudaDevAttrPciBusId, impl_->gpu)) << 16 |
         attribute(cudaDevAttrPciDeviceId, impl_->gpu);
}
std::string RankDevice::kernels() const {
  return fmt::format("CUDA {}.{}", attribute(cudaDevAttrComputeCapabilityMajor, impl_->gpu),
                     attribute(cudaDevAttrComputeCapabilityMinor, impl_->gpu));
}
void* RankDevice::stream() const { return impl_->stream; }
std::size_t RankDevice::memory_bytes() const { return impl_->memory; }

void RankDevice::copy_in(void* to, const void* host, std::size_t bytes) {
  const UseDevice use(impl_->gpu);
  if (bytes > 0) check(cudaMemcpyAsync(to, host, bytes, cudaMemcpyHostToDevice, impl_->stream), "copy to the GPU");
}

void RankDevice::copy_out(void* host, const void* from, std::size_t bytes) {
  const UseDevice use(impl_->gpu);
  if (bytes > 0) check(cudaMemcpyAsync(host, from, bytes, cudaMemcpyDeviceToHost, impl_->stream), "copy from the GPU");
}

void RankDevice::fetch(void* host, const void* from, std::size_t bytes) {
  constexpr std::size_t kPinned = std::size_t{4} << 20;  // pinned memory is not to be wasted
  const UseDevice use(impl_->gpu);
  if (bytes > kPinned) {
    copy_out(host, from, bytes);
    return finish();
  }
  if (impl_->result.bytes() < bytes) impl_->result.resize(bytes);
  copy_out(impl_->result.data(), from, bytes);
  finish();
  if (bytes > 0) std::memcpy(host, impl_->result.data(), bytes);
}

void RankDevice::copy(void* to, const void* from, std::size_t bytes) {
  const UseDevice use(impl_->gpu);
  if (bytes > 0) check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, impl_->stream), "copy on the GPU");
}

void RankDevice::fill_zero(void* to, std::size_t bytes) {
  const UseDevice use(impl_->gpu);
  if (bytes > 0) check(cudaMemsetAsync(to, 0, bytes, impl_->stream), "clearing of GPU memory");
}

void RankDevice::finish() {
  const UseDevice use(impl_->gpu);
  check(cudaStreamSynchronize(impl_->stream), "work on the GPU");
}

void RankDevice::wait_for(void* stream) {
  const UseDevice use(impl_->gpu);
  check(cudaEventRecord(impl_->event, as_stream(stream)), "event");
  check(cudaStreamWaitEvent(impl_->stream, impl_->event, 0), "event");
}

void RankDevice::hold_up(void* stream) {
  const UseDevice use(impl_->gpu);
  check(cudaEventRecord(impl_->event, impl_->stream), "event");
  check(cudaStreamWaitEvent(as_stream(stream), impl_->event, 0), "event");
}

void RankDevice::store_rows(const KvView& source, std::int64_t first, std::int64_t count, DType type, std::byte* rows,
                            float* scales) {
  const UseDevice use(impl_->gpu);
  RowConversion conversion;
  conversion.token_stride = source.token_stride;
  conversion.head_stride = source.head_stride;
  conversion.scale_token_stride = source.scale_token_stride;
  conversion.scale_head_stride = source.scale_head_stride;
  conversion.from_type = source.dtype;
  conversion.heads = static_cast<int>(source.kv_heads);
  conversion.dim = static_cast<int>(source.head_dim);
  conversion.to_type = type;
  conversion.to = rows;
  conversion.to_scales = scales;
  const std::int64_t token_rows = source.kv_heads;
  for (std::int64_t token = first; token < first + count; token += conversion.tokens) {
    // A page of the source at a time: within one the addresses are even.
    conversion.tokens = first + count - token;
    if (source.page_tokens > 0) {
      conversion.tokens = std::min(conversion.tokens, source.page_tokens - token % source.page_tokens);
    }
    conversion.from = kv_row(source, 0, token, 0);
    conversion.from_scales = source.scales == nullptr ? nullptr : kv_scale_address(source, 0, token, 0);
    convert_rows(conversion, impl_->stream);
    conversion.to += static_cast<std::size_t>(conversion.tokens * token_rows * source.head_dim) * dtype_size(type);
    if (scales != nullptr) conversion.to_scales += conversion.tokens * token_rows;
  }
}

float* RankDevice::attend(const Problem& problem) {
  const UseDevice use(impl_->gpu);
  impl_->stepped = false;
  return impl_->plan->run(problem);
}

void RankDevice::attend_into(const Problem& problem, float* states_on_gpu, bool q_on_gpu) {
  const UseDevice use(impl_->gpu);
  impl_->stepped = false;
  impl_->plan->run_into(problem, states_on_gpu, q_on_gpu);
}

void RankDevice::finalize(const float* states, std::size_t rows, std::int64_t v_dim, float* out) {
  const UseDevice use(impl_->gpu);
  cuda::finalize(states, {rows, state_floats(v_dim)}, nullptr, 1, out, nullptr, impl_->stream);
}

void RankDevice::attend(const Problem& problem, float* states) {
  const UseDevice use(impl_->gpu);
  impl_->stepped = false;
  const float* on_gpu = impl_->plan->run(problem);
  const auto floats =
      problem.nodes.size() * static_cast<std::size_t>(problem.rows()) * state_floats(problem.v.head_dim);
  fetch(states, on_gpu, floats * sizeof(float));
}

void RankDevice::attend_on_device(const Problem& problem, float* out) {
  const UseDevice use(impl_->gpu);
  impl_->stepped = false;
  impl_->plan->run(problem, out);
}

void* RankDevice::step_queries(std::size_t bytes) {
  const UseDevice use(impl_->gpu);
  return impl_->steps->step_queries(bytes);
}

std::vector<std::int64_t> RankDevice::prepare_step(const Problem& problem, void* stream) {
  const UseDevice use(impl_->gpu);
  impl_->stepped = true;
  std::vector<std::int64_t> key = impl_->steps->prepare_step(problem);
  hold_up(stream);
  return key;
}

void RankDevice::send_step(void* stream) {
  const UseDevice use(impl_->gpu);
  impl_->steps->send_step(as_stream(stream));
}

StepTarget RankDevice::step_target(const KvView& k, const KvView& v) const {
  const AttentionParams& p = impl_->steps->step_params();
  StepTarget target;
  target.k = p.k;
  target.v = p.v;
  target.k.data = static_cast<const std::byte*>(k.data);
  target.v.data = static_cast<const std::byte*>(v.data);
  target.lengths = p.lengths;
  target.turned_q = const_cast<std::byte*>(p.q);
  target.rows = static_cast<int>(p.rows / p.heads);
  target.heads = p.heads;
  target.kv_heads = p.kv_heads;
  return target;
}

void RankDevice::store_step(const StepTarget& target, const StepRows& rows, void* stream) {
  const UseDevice use(impl_->gpu);
  cuda::store_step(target, {rows.q, rows.k, rows.v}, impl_->overlaps, as_stream(stream));
}

void RankDevice::attend_step(const KvView& k, const KvView& v, float* out, std::uint16_t* rounded_out, void* stream) {
  const UseDevice use(impl_->gpu);
  impl_->steps->step(k, v, out, rounded_out, impl_->overlaps, as_stream(stream));
}

void RankDevice::attend_step_into(const KvView& k, const KvView& v, float* states, void* stream) {
  const UseDevice use(impl_->gpu);
  impl_->steps->step_into(k, v, states, impl_->overlaps, as_stream(stream));
}

std::string_view RankDevice::kernel() const { return (impl_->stepped ? impl_->steps : impl_->plan)->kernel(); }

double RankDevice::read_bandwidth(std::size_t bytes) {
  const UseDevice use(impl_->gpu);
  bytes -= bytes % 16;
  const DeviceBuffer data(bytes), sink(sizeof(unsigned));
  check(cudaMemsetAsync(data.as<void>(), 1, bytes, impl_->stream), "clearing of GPU memory");
  const double seconds =
      best_seconds(impl_->stream, [&] { read_all(data.as<void>(), bytes, sink.as<unsigned>(), impl_->stream); });
  return static_cast<double>(bytes) / seconds * 1e-9;
}

double RankDevice::product_rate(std::int64_t size) {
  const UseDevice use(impl_->gpu);
  const auto elements = static_cast<std::size_t>(size * size);
  const DeviceBuffer a(elements * sizeof(std::uint16_t)), b(elements * sizeof(std::uint16_t)),
      y(elements * sizeof(float));
  // Bits that are numbers of order 1, not zeros: a product of zeros takes less power and runs faster.
  fill_noise(a.as<std::uint16_t>(), elements, 1, impl_->stream);
  fill_noise(b.as<std::uint16_t>(), elements, 2, impl_->stream);
  MatrixProduct product(impl_->gpu);
  const double seconds = best_seconds(impl_->stream, [&] {
    product.multiply(a.as<std::uint16_t>(), b.as<std::uint16_t>(), size, size, size, y.as<float>(), false,
                     impl_->stream);
  });
  const auto n = static_cast<double>(size);
  return 2 * n * n * n / seconds * 1e-12;
}

}  // namespace treeattn::kernels::cuda
