// SPDX-License-Identifier: Apache-2.0
// The public calls on a GPU: check, split, upload; then launch.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "base/check.h"
#include "kernels/cuda/device_buffer.h"
#include "kernels/cuda/launch_config.h"
#include "kernels/cuda/plan_parts.h"
#include "kernels/cuda/tensor_map.h"
#include "treeattn/cuda.h"
#include "treeattn/error.h"

namespace treeattn {

namespace kernels::cuda {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // so that the next call does not report this one
  throw Unavailable(fmt::format("{}: {}", what, cudaGetErrorString(error)));
}

int shared_memory(cudaDeviceAttr of) {
  int gpu = 0, most = 0;
  check(cudaGetDevice(&gpu), "current GPU");
  check(cudaDeviceGetAttribute(&most, of, gpu), "shared memory of the GPU");
  return most;
}

DeviceBuffer::DeviceBuffer(std::size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  const cudaError_t error = cudaMalloc(&data_, bytes);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    std::size_t free = 0, total = 0;
    cudaMemGetInfo(&free, &total);
    throw Unavailable(fmt::format("{} bytes of GPU memory wanted, {} of {} free", bytes, free, total));
  }
  check(error, "allocation of GPU memory");
}

namespace {

DeviceKv device_kv(const KvView& view) {
  DeviceKv out;
  out.data = static_cast<const std::byte*>(view.data);
  out.scales = view.scales;
  out.batch_stride = view.batch_stride;
  out.token_stride = view.token_stride;
  out.head_stride = view.head_stride;
  out.page_stride = view.page_stride;
  out.scale_batch_stride = view.scale_batch_stride;
  out.scale_token_stride = view.scale_token_stride;
  out.scale_head_stride = view.scale_head_stride;
  out.scale_page_stride = view.scale_page_stride;
  out.pages_per_sequence = view.pages_per_sequence;
  out.page_tokens = view.page_tokens;
  out.dim = static_cast<int>(view.head_dim);
  out.dtype = view.dtype;
  return out;
}

// Where no sequence has a token there need not be a table.
DeviceBuffer upload_table(const KvView& view) {
  if (view.page_tokens == 0 || view.page_table == nullptr) return {};
  return DeviceBuffer::copy_of(view.page_table, static_cast<std::size_t>(view.batch * view.pages_per_sequence));
}

}  // namespace

AttentionParams params_of(const Problem& problem) {
  AttentionParams p;
  p.q = static_cast<const std::byte*>(problem.q.data);
  p.q_batch_stride = problem.q.batch_stride;
  p.q_query_stride = problem.q.query_stride;
  p.q_head_stride = problem.q.head_stride;
  p.q_dtype = problem.q.dtype;
  p.k = device_kv(problem.k);
  p.v = device_kv(problem.v);
  p.first_key = problem.first_key;
  p.most_tokens = problem.k.tokens;
  p.batch = static_cast<int>(problem.q.batch);
  p.queries = static_cast<int>(problem.q.queries);
  p.heads = static_cast<int>(problem.q.heads);
  p.kv_heads = static_cast<int>(problem.k.kv_heads);
  p.heads_per_kv = static_cast<int>(problem.group());
  p.scale = problem.scale;
  p.softcap = problem.softcap;
  p.causal = problem.causal;
  p.window = problem.window;
  p.order = problem.order;
  p.rows = problem.rows();
  if (p.order.placement == Placement::kContiguous) {
    p.leaf_chunks =
        static_cast<int>(std::min<std::int64_t>(p.order.branch_tokens / p.order.chunk_tokens, std::int64_t{1} << 24));
  }
  return p;
}

namespace {

std::size_t shared_memory_of_block() {
  return static_cast<std::size_t>(shared_memory(cudaDevAttrMaxSharedMemoryPerBlockOptin));
}

// Makes a kernel ready on the current GPU and returns how many of its blocks a multiprocessor holds. Once for each:
// every one of these calls takes a lock of the driver, for which ranks that share a GPU would queue at every step.
int blocks_of_multiprocessor(const void* kernel, int threads, std::size_t shared_bytes) {
  static std::mutex mutex;
  static std::map<std::tuple<int, const void*, int, std::size_t>, int> known;
  int gpu = 0, resident = 0;
  check(cudaGetDevice(&gpu), "current GPU");
  const std::scoped_lock lock(mutex);
  const auto found = known.try_emplace({gpu, kernel, threads, shared_bytes}, 0).first;
  if (found->second > 0) return found->second;
  // As much as the GPU gives, and not what this call needs: another thread may be about to start the same kernel.
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, kernel), "loading of the kernel");
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shared_memory_of_block() - attributes.sharedSizeBytes)),
        "shared memory of the kernel");
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, threads, shared_bytes),
        "blocks of a multiprocessor");
  return found->second = std::max(1, resident);
}

// Queries as if they were keys.
KvView rows_of(const QueryView& q) {
  KvView view;
  view.data = q.data;
  view.dtype = q.dtype;
  view.batch = q.batch;
  view.tokens = q.queries;
  view.kv_heads = q.heads;
  view.head_dim = q.head_dim;
  view.batch_stride = q.batch_stride;
  view.token_stride = q.query_stride;
  view.head_stride = q.head_stride;
  return view;
}

// Neighbouring heads as one.
KvView joined(KvView view, int heads) {
  view.head_dim *= heads;
  view.head_stride *= heads;
  view.kv_heads /= heads;
  return view;
}

}  // namespace

bool make_tensor_maps(const KvView& k, const KvView& v, const Launch& launch, AttentionParams& params) {
  const auto make = [&](const KvView& view, TensorMap& map) {
    return make_tensor_map(joined(view, launch.limits.kv_heads), params.first_key, launch.tile, launch.whole_lines,
                           map);
  };
  return make(k, params.k_map) && make(v, params.v_map);
}

bool code_is_for_hopper() {
  static std::mutex mutex;
  static std::map<int, bool> known;  // by GPU: asking takes a lock of the driver
  int gpu = 0;
  check(cudaGetDevice(&gpu), "current GPU");
  const std::scoped_lock lock(mutex);
  if (const auto found = known.find(gpu); found != known.end()) return found->second;
  // Any kernel will do: all are compiled for the same GPUs, but for those of hopper_*.cu.
  const Launch any = find_generic({}, 1, shared_memory_of_block());
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(any.kernel)), "loading of a kernel");
  return known[gpu] = attributes.ptxVersion >= 90;
}

Launch prepare_launch(const Problem& problem, int multiprocessors, AttentionParams& params) {
  const int rows = static_cast<int>(std::min<std::int64_t>(problem.group() * problem.q.queries, 16));
  Launch launch = find_prefill(params);
  if (launch.kernel != nullptr) {
    params.tensor_copies = make_tensor_maps(problem.k, problem.v, launch, params) &&
                           make_tensor_map(rows_of(problem.q), 0, launch.tile, launch.whole_lines, params.q_map);
    if (!params.tensor_copies) launch = {};
  }
  if (launch.kernel == nullptr) {
    const std::size_t most_bytes = shared_memory_of_block();
    launch = find_decode_mma(params, rows, most_bytes);
    if (launch.kernel == nullptr) launch = find_generic(params, rows, most_bytes);
    params.tensor_copies = launch.tile > 0 && make_tensor_maps(problem.k, problem.v, launch, params);
  }
  if (launch.takes_items) {
    int levels = 0;
    for (const plan::TreeNode& node : problem.nodes) levels = std::max(levels, node.level);
    add_redo(params, levels, launch);
    blocks_of_multiprocessor(reinterpret_cast<const void*>(launch.redo), kRedoThreads, launch.redo_bytes);
  }
  launch.slots = multiprocessors * blocks_of_multiprocessor(reinterpret_cast<const void*>(launch.kernel),
                                                            launch.threads, launch.shared_bytes);
  // Measured on an H200, whose memory has as many multiprocessors for its bandwidth as others.
  constexpr int kBusyBytes = 96 << 10;  // on their way to a multiprocessor
  launch.busy = launch.slots;
  if (launch.ring_bytes > 0) launch.busy = std::min(launch.slots, multiprocessors * kBusyBytes / launch.ring_bytes);
  return launch;
}

Work split(const Problem& problem, const Launch& launch) {
  return launch.takes_items ? split_prefill(problem, launch.slots)
                            : split_work(problem, launch.limits, launch.slots, launch.busy);
}

void set_work(const Work& work, const WorkMemory& memory, AttentionParams& params) {
  params.items = memory.items;
  params.item_count = static_cast<int>(work.items.size());
  params.grid = work.grid;
  params.rows_per_item = work.rows_per_item;
  params.item_states = reinterpret_cast<float*>(memory.workspace);
  params.arrived = memory.counters;
  params.bad_rows = reinterpret_cast<unsigned*>(memory.workspace);
  params.waiting = reinterpret_cast<float*>(memory.workspace + work.bad_rows_bytes);
  params.waiting_levels = work.waiting_levels;
}

void start(const Launch& launch, AttentionParams& params, void* stream, bool early) {
  void* arguments[] = {&params};
  const auto items = static_cast<unsigned>(params.item_count);
  const unsigned blocks = launch.takes_items ? std::min(items, static_cast<unsigned>(launch.slots)) : items;
  const LaunchConfig config(blocks, static_cast<unsigned>(launch.threads), launch.shared_bytes, early && launch.waits,
                            static_cast<cudaStream_t>(stream));
  check(cudaLaunchKernelExC(config.get(), reinterpret_cast<const void*>(launch.kernel), arguments), "launch");
  if (launch.redo == nullptr) return;
  const unsigned checkers = (items * (kPrefillRows / 8) + kRedoThreads - 1) / kRedoThreads;
  check(cudaLaunchKernel(reinterpret_cast<const void*>(launch.redo), checkers, kRedoThreads, arguments,
                         launch.redo_bytes, static_cast<cudaStream_t>(stream)),
        "launch");
}

}  // namespace kernels::cuda

using kernels::cuda::check;
using kernels::cuda::DeviceBuffer;

struct CudaPlan::Impl {
  int device = 0;
  kernels::cuda::Launch launch;
  kernels::cuda::AttentionParams params;
  DeviceBuffer k_table, v_table, lengths, first_query, slopes, sinks, item_list, states, arrived;

  std::size_t bytes() const {
    std::size_t sum = 0;
    for (const DeviceBuffer* buffer :
         {&k_table, &v_table, &lengths, &first_query, &slopes, &sinks, &item_list, &states, &arrived}) {
      sum += buffer->bytes();
    }
    return sum;
  }

  void run(void* stream) {
    const kernels::cuda::UseDevice use(device);
    kernels::cuda::start(launch, params, stream);
  }
};

CudaPlan::CudaPlan(int device, const AttentionInput& in, const AttentionOptions& options)
    : impl_(std::make_unique<Impl>()) {
  const std::string problem_of_device = cuda_problem();
  if (!problem_of_device.empty()) throw Unavailable(problem_of_device);
  const kernels::Problem problem = kernels::make_problem(in, options);
  int devices = 0, multiprocessors = 0;
  check(cudaGetDeviceCount(&devices), "number of GPUs");
  if (device < 0 || device >= devices) throw Unavailable(fmt::format("GPU {}; accepted: 0 to {}", device, devices - 1));
  // cudaGetDeviceProperties takes milliseconds; this does not.
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "attribute of the GPU");
  const kernels::cuda::UseDevice use(device);
  Impl& plan = *impl_;
  plan.device = device;
  const auto upload = [](const auto& values) { return DeviceBuffer::copy_of(values.data(), values.size()); };
  plan.k_table = kernels::cuda::upload_table(problem.k);
  plan.v_table = kernels::cuda::upload_table(problem.v);
  plan.lengths = upload(problem.lengths);
  plan.first_query = upload(problem.first_query);
  plan.slopes = upload(problem.alibi_slopes);
  plan.sinks = upload(problem.sinks);
  kernels::cuda::AttentionParams& p = plan.params;
  p = kernels::cuda::params_of(problem);
  p.k.page_table = plan.k_table.as<std::int32_t>();
  p.v.page_table = plan.v_table.as<std::int32_t>();
  p.lengths = plan.lengths.as<std::int64_t>();
  p.first_query = plan.first_query.as<std::int64_t>();
  p.alibi_slopes = plan.slopes.as<float>();
  p.sinks = plan.sinks.as<float>();
  plan.launch = kernels::cuda::prepare_launch(problem, multiprocessors, p);

  const kernels::cuda::Work work = kernels::cuda::split(problem, plan.launch);
  plan.item_list = upload(work.items);
  plan.states = DeviceBuffer(work.workspace_bytes);
  plan.arrived = DeviceBuffer(work.counters * sizeof(unsigned));
  check(cudaMemset(plan.arrived.as<unsigned>(), 0, plan.arrived.bytes()), "clearing of counters");
  check(cudaStreamSynchronize(cudaStreamLegacy), "clearing of counters");  // before any stream of the caller's

  kernels::cuda::set_work(
      work, {plan.item_list.as<kernels::cuda::WorkItem>(), plan.states.as<std::byte>(), plan.arrived.as<unsigned>()},
      p);
  p.first_known = p.tensor_copies && p.k.page_tokens == 0 && p.v.page_tokens == 0 && plan.launch.ring_tokens > 0 &&
                  kernels::cuda::begin_with(problem, work, plan.launch.ring_tokens);
  p.q_first = std::all_of(work.items.begin(), work.items.end(), [&](const kernels::cuda::WorkItem& item) {
    return item.chunks * problem.order.chunk_tokens <= plan.launch.ring_tokens;
  });
}

CudaPlan::~CudaPlan() = default;
CudaPlan::CudaPlan(CudaPlan&&) noexcept = default;
CudaPlan& CudaPlan::operator=(CudaPlan&&) noexcept = default;

void CudaPlan::attention(float* out, float* lse, void* stream) {
  base::require(out != nullptr, "out = null; accepted: memory of the GPU");
  impl_->params.states = nullptr;
  impl_->params.out = out;
  impl_->params.lse = lse;
  impl_->run(stream);
}

void CudaPlan::attention_states(float* states, void* stream) {
  base::require(states != nullptr, "states = null; accepted: memory of the GPU");
  impl_->params.states = states;
  impl_->run(stream);
}

std::size_t CudaPlan::workspace_bytes() const { return impl_->bytes(); }

std::string CudaPlan::kernel() const { return impl_->launch.name; }

std::vector<CudaDevice> cuda_devices() {
  std::vector<CudaDevice> out;
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return out;
  }
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, i) != cudaSuccess) continue;
    CudaDevice device;
    device.index = i;
    device.name = properties.name;
    device.compute_major = properties.major;
    device.compute_minor = properties.minor;
    device.multiprocessors = properties.multiProcessorCount;
    device.memory_bytes = properties.totalGlobalMem;
    out.push_back(device);
  }
  return out;
}

std::size_t cuda_free_bytes(int device) {
  const kernels::cuda::UseDevice use(device);
  std::size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "free memory of the GPU");
  return free;
}

std::string cuda_problem() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count > 0) return "";
  cudaGetLastError();
  int driver = 0, needed = 0;  // 1000 times the major number and 10 times the minor; 0: there is no driver
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&needed);
  if (driver == 0) return "no GPU: there is no CUDA driver on this machine";
  if (error == cudaErrorInsufficientDriver) {
    return fmt::format("the CUDA driver is too old: it serves CUDA {}.{}, and this build needs {}.{}", driver / 1000,
                       driver % 1000 / 10, needed / 1000, needed % 1000 / 10);
  }
  return fmt::format("no GPU: {}", error == cudaSuccess ? "the driver lists none" : cudaGetErrorString(error));
}

}  // namespace treeattn
