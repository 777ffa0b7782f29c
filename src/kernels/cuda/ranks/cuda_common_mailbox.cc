// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>
#include <utility>

#include "base/relax.h"
#include "kernels/cuda/ranks/common_mailbox.h"
#include "kernels/cuda/ranks/exchange_params.h"

namespace treeattn::kernels::cuda {
namespace {

// For a lock that is held for some microseconds: falling asleep and waking up would take longer.
std::unique_lock<std::mutex> lock_awake(std::mutex& mutex) {
  constexpr int kPatience = 64;  // then whoever holds it may need this core
  std::unique_lock lock(mutex, std::defer_lock);
  for (int turns = 1; !lock.try_lock(); ++turns) {
    base::relax();
    if (turns % kPatience == 0) std::this_thread::yield();
  }
  return lock;
}

}  // namespace

struct CommonMailbox::Impl {
  ~Impl() {
    attended.push_back(merged);
    for (cudaEvent_t event : attended) {
      if (event != nullptr) cudaEventDestroy(event);
    }
  }

  int gpu = 0;
  ExchangePlan plan;
  DeviceBuffer blocks;                // of all ranks
  DeviceBuffer merges;                // the plan's
  PinnedBuffer told;                  // what the merge tells the host: the root's block, then who has finished it
  DeviceBuffer kept;                  // the root's block
  std::vector<cudaEvent_t> attended;  // [ranks] in the order in which they come: this one and all before it
  cudaEvent_t merged = nullptr;
  PeerParams merge;  // but for the turn
  std::mutex mutex;
  std::uint64_t arrivals = 0;

  const float* root() const { return reinterpret_cast<const float*>(told.data()); }
  bool finished(std::uint64_t turn) const;
};

CommonMailbox::CommonMailbox(int gpu, ExchangePlan plan) : impl_(std::make_unique<Impl>()) {
  const UseDevice use(gpu);
  impl_->gpu = gpu;
  impl_->plan = std::move(plan);
  const ExchangePlan& shape = impl_->plan;
  load_exchange();
  impl_->blocks =
      DeviceBuffer(static_cast<std::size_t>(shape.first_block.back()) * shape.block_floats() * sizeof(float));
  impl_->merges = merges_on_gpu(shape);
  impl_->told.resize(shape.block_floats() * sizeof(float) + kMergeBlocks * sizeof(unsigned));
  std::fill_n(impl_->told.data(), impl_->told.bytes(), std::byte{0});
  impl_->attended.resize(shape.first_block.size() - 1);
  for (cudaEvent_t& event : impl_->attended) {
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "event");
  }
  check(cudaEventCreateWithFlags(&impl_->merged, cudaEventDisableTiming), "event");
  impl_->kept = DeviceBuffer(shape.block_floats() * sizeof(float));
  // Nobody pushes, and nobody has to be waited for.
  PeerParams& merge = impl_->merge;
  merge = merge_params(shape, impl_->merges.as<int>(), impl_->told);
  merge.push = false;
  merge.states = impl_->blocks.as<float>();
  merge.kept = impl_->kept.as<float>();
  merge.finished = reinterpret_cast<unsigned*>(merge.result + shape.block_floats());
}

CommonMailbox::~CommonMailbox() = default;

const ExchangePlan& CommonMailbox::plan() const { return impl_->plan; }

float* CommonMailbox::place(int rank) const {
  const auto first = static_cast<std::size_t>(impl_->plan.first_block[static_cast<std::size_t>(rank)]);
  return impl_->blocks.as<float>() + first * impl_->plan.block_floats();
}

// Each waits for the one before it, so that the merge has to wait for one alone: every wait takes its time, though what
// it is for has long been done.
std::uint64_t CommonMailbox::arrive(void* stream) {
  const UseDevice use(impl_->gpu);
  const auto own = static_cast<cudaStream_t>(stream);
  const std::unique_lock<std::mutex> lock = lock_awake(impl_->mutex);
  const std::size_t place = impl_->arrivals % impl_->attended.size();
  const std::uint64_t turn = impl_->arrivals / impl_->attended.size() + 1;
  if (place > 0) check(cudaStreamWaitEvent(own, impl_->attended[place - 1], 0), "event");
  if (place + 1 < impl_->attended.size()) {
    check(cudaEventRecord(impl_->attended[place], own), "event");
    ++impl_->arrivals;
    return turn;
  }
  PeerParams merge = impl_->merge;
  merge.turn = static_cast<unsigned>(turn);
  start_exchange(merge, false, own);
  check(cudaEventRecord(impl_->merged, own), "event");
  ++impl_->arrivals;
  return turn;
}

bool CommonMailbox::Impl::finished(std::uint64_t turn) const {
  const auto* flags = reinterpret_cast<const unsigned*>(root() + plan.block_floats());
  return std::all_of(flags, flags + exchange_blocks(merge), [&](const unsigned& flag) {
    return __atomic_load_n(&flag, __ATOMIC_ACQUIRE) == static_cast<unsigned>(turn);
  });
}

// Looks at flags, as ranks that ask the driver would queue for its lock; asks it now and then for errors.
const float* CommonMailbox::wait(std::uint64_t turn, void* stream) const {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kLong{1};
  for (auto start = Clock::now(); !impl_->finished(turn);) {
    base::relax();
    if (Clock::now() - start < kLong) continue;
    const cudaError_t error = cudaStreamQuery(static_cast<cudaStream_t>(stream));
    if (error != cudaErrorNotReady) check(error, "work on the GPU");
    std::this_thread::yield();
    start = Clock::now();
  }
  return impl_->root();
}

const float* CommonMailbox::follow(void* stream) const {
  const UseDevice use(impl_->gpu);
  check(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), impl_->merged, 0), "event");
  return impl_->kept.as<float>();
}

}  // namespace treeattn::kernels::cuda
