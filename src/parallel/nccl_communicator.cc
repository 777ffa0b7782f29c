// SPDX-License-Identifier: Apache-2.0
#include "parallel/nccl_communicator.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "kernels/cuda/device_buffer.h"
#include "parallel/agree.h"
#include "treeattn/error.h"

namespace treeattn::parallel {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::microseconds kNap{20};

// How many blocks NCCL may start. Those of all ranks wait for each other, so ranks that share a GPU must leave room for
// each other there. Half of the GPU, for work of other streams. Throws Unavailable on every rank where more than two
// share one: NCCL's kernels of three and four were seen to wait for each other for ever.
int most_blocks(Communicator& ranks, int gpu) {
  constexpr int kMostOnOneGpu = 2;
  cudaDeviceProp properties{};
  kernels::cuda::check(cudaGetDeviceProperties(&properties, gpu), "properties of the GPU");
  using Uuid = std::array<char, sizeof properties.uuid.bytes>;
  Uuid mine;
  std::memcpy(mine.data(), properties.uuid.bytes, mine.size());
  const std::vector<Uuid> all = gathered(ranks, mine);
  for (std::size_t r = 0; r < all.size(); ++r) {
    const auto here = std::count(all.begin(), all.end(), all[r]);
    if (here > kMostOnOneGpu) {
      throw Unavailable(
          fmt::format("NCCL: {} ranks on the GPU of rank {}; accepted: at most {} on one (link = peer takes "
                      "more)",
                      here, r, kMostOnOneGpu));
    }
  }
  const auto sharing = static_cast<int>(std::count(all.begin(), all.end(), mine));
  return sharing == 1 ? NCCL_CONFIG_UNDEF_INT : std::max(1, properties.multiProcessorCount / (2 * sharing));
}

}  // namespace

void NcclCommunicator::make(Communicator& ranks, int gpu) {
  struct Start {
    ncclUniqueId id;
    int code;
  } start{};
  if (ranks.rank() == 0) start.code = ncclGetUniqueId(&start.id);
  ranks.broadcast(std::as_writable_bytes(std::span(&start, 1)), 0);
  within_ = ranks.deadline();
  const int blocks = most_blocks(ranks, gpu);
  const kernels::cuda::UseDevice use(gpu);
  std::string failure;
  try {
    begun(static_cast<ncclResult_t>(start.code), "ncclGetUniqueId");
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    config.maxCTAs = blocks;
    begun(ncclCommInitRankConfig(&comm_, ranks.size(), start.id, ranks.rank(), &config), "ncclCommInitRankConfig");
    settle("ncclCommInitRankConfig");
  } catch (const NcclFailure& error) {
    failure = error.what;
    abort();
  }
  const std::vector<char> failed = gathered(ranks, static_cast<char>(failure.empty() ? 0 : 1));
  const auto first = std::find(failed.begin(), failed.end(), char{1});
  if (first == failed.end()) return;
  abort();
  throw Unavailable("NCCL: " + (failure.empty() ? fmt::format("failed on rank {}", first - failed.begin()) : failure));
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

void NcclCommunicator::wait(cudaEvent_t event) const {
  until("reduction by NCCL", [&] {
    state("reduction by NCCL");
    const cudaError_t error = cudaEventQuery(event);
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
