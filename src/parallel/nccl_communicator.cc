// SPDX-License-Identifier: Apache-2.0
#include "parallel/nccl_communicator.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "base/timing.h"
#include "kernels/cuda/device_buffer.h"
#include "parallel/agree.h"
#include "parallel/device_reduce.h"
#include "parallel/lend.h"
#include "treeattn/error.h"

namespace treeattn::parallel {
namespace {

using base::Clock;

constexpr std::chrono::microseconds kNap{20};

using GpuName = std::array<char, sizeof(cudaUUID_t::bytes)>;

// How many blocks NCCL may start. Those of all ranks wait for each other, so ranks that share a GPU must leave room for
// each other there. Half of the GPU, for work of other streams.
int most_blocks(int gpu, std::ptrdiff_t sharing) {
  int multiprocessors = 0;
  kernels::cuda::check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, gpu),
                       "attribute of the GPU");
  return sharing == 1 ? NCCL_CONFIG_UNDEF_INT : std::max(1, multiprocessors / (2 * static_cast<int>(sharing)));
}

GpuName name_of(int gpu) {
  cudaDeviceProp properties{};
  kernels::cuda::check(cudaGetDeviceProperties(&properties, gpu), "properties of the GPU");
  GpuName name;
  std::memcpy(name.data(), properties.uuid.bytes, name.size());
  return name;
}

// Of NCCL, or of the GPU.
template <class Body>
std::string any_failure_of(const Body& body) {
  try {
    return failure_of(body);
  } catch (const NcclFailure& error) {
    return error.what;
  }
}

}  // namespace

void NcclCommunicator::make(Communicator& ranks, int gpu) {
  struct Start {
    ncclUniqueId id;
    int code;
  } start{};
  if (ranks.rank() == 0) start.code = ncclGetUniqueId(&start.id);
  ranks.broadcast(std::as_writable_bytes(std::span(&start, 1)), 0);
  within_ = kShareOfDeadline * ranks.deadline();
  const auto on_all_or_none = [&](const auto& work) {
    const std::string own = any_failure_of(work);
    if (!own.empty()) abort();
    const std::string failure = failure_of_any(ranks, own);
    if (failure.empty()) return;
    abort();
    throw Unavailable("NCCL: " + failure);
  };
  GpuName mine{};
  on_all_or_none([&] { mine = name_of(gpu); });  // now: what fails later, the others wait for inside NCCL
  const std::vector<GpuName> all = gathered(ranks, mine);
  const auto having = [&](const GpuName& name) { return std::ranges::count(all, name); };
  shares_gpus_ = std::ranges::any_of(all, [&](const GpuName& name) { return having(name) > 1; });
  shares_a_process_ = share_a_process(ranks);
  on_all_or_none([&] {
    const kernels::cuda::UseDevice use(gpu);
    begun(static_cast<ncclResult_t>(start.code), "ncclGetUniqueId");
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    config.maxCTAs = most_blocks(gpu, having(mine));
    begun(ncclCommInitRankConfig(&comm_, ranks.size(), start.id, ranks.rank(), &config), "ncclCommInitRankConfig");
    settle("ncclCommInitRankConfig");
  });
}

void NcclCommunicator::abort() {
  if (comm_ != nullptr) ncclCommAbort(comm_);
  comm_ = nullptr;
}

void NcclCommunicator::begun(ncclResult_t result, const char* what) const {
  if (result == ncclSuccess || result == ncclInProgress) return;
  const char* more = comm_ != nullptr ? ncclGetLastError(comm_) : nullptr;
  throw NcclFailure{
      fmt::format("{}: {}{}{}", what, ncclGetErrorString(result), more && *more ? ": " : "", more ? more : "")};
}

void NcclCommunicator::settle(const char* what) const {
  until(what, [&] { return state(what) != ncclInProgress; });
}

void NcclCommunicator::wait(cudaStream_t stream) const {
  until("reduction by NCCL", [&] {
    state("reduction by NCCL");
    const cudaError_t error = cudaStreamQuery(stream);
    if (error != cudaSuccess && error != cudaErrorNotReady) throw NcclFailure{cudaGetErrorString(error)};
    return error == cudaSuccess;
  });
}

ncclResult_t NcclCommunicator::state(const char* what) const {
  ncclResult_t result = ncclSuccess;
  begun(ncclCommGetAsyncError(comm_, &result), "ncclCommGetAsyncError");
  begun(result, what);
  return result;
}

void NcclCommunicator::until(const char* what, const std::function<bool()>& ready) const {
  const auto start = Clock::now();
  while (!ready()) {
    if (Clock::now() - start > within_) {
      throw NcclFailure{fmt::format("{}: not within {:.1f} s", what, within_.count())};
    }
    if (Clock::now() - start > std::chrono::milliseconds(1)) std::this_thread::sleep_for(kNap);
  }
}

}  // namespace treeattn::parallel
