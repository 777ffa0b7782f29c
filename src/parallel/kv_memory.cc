// SPDX-License-Identifier: Apache-2.0
#include "parallel/kv_memory.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/available_memory.h"
#include "base/check.h"
#include "base/machine.h"
#include "base/virtual_memory.h"
#include "comm/far_memory.h"
#include "treeattn/kv_cache.h"

namespace treeattn::parallel {
namespace {

class HostArray final : public GrowingArray {
 public:
  explicit HostArray(std::size_t bytes) : memory_(bytes) {}
  std::byte* data() const override { return memory_.data(); }
  void grow(std::size_t bytes) override { memory_.grow(bytes); }
  void discard(std::size_t first, std::size_t bytes) noexcept override { memory_.discard(first, bytes); }

 private:
  base::VirtualMemory memory_;
};

class HostMemory final : public KvMemory {
 public:
  explicit HostMemory(int ranks) : ranks_(static_cast<std::size_t>(ranks)) {}
  // A pool reserves twice this. Where addresses are limited (ulimit -v) all pools together take half of what is left:
  // threads and whatever they allocate need some, too.
  std::size_t bytes() const override {
    const std::size_t memory = std::max(base::read_machine().memory_bytes, std::size_t{1} << 30);
    return std::min(memory, base::available_addresses() / (4 * ranks_));
  }
  std::unique_ptr<GrowingArray> reserve(std::size_t bytes) override { return std::make_unique<HostArray>(bytes); }
  void copy(std::byte* to, const std::byte* from, std::size_t bytes) override { std::memcpy(to, from, bytes); }
  void fill_zero(std::byte* to, std::size_t bytes) override { std::memset(to, 0, bytes); }
  void copy_in(std::byte* to, const std::byte* host, std::size_t bytes) override { std::memcpy(to, host, bytes); }
  void copy_out(std::byte* host, const std::byte* from, std::size_t bytes) override { std::memcpy(host, from, bytes); }
  void finish() override {}
  kernels::cuda::RankDevice* device() const override { return nullptr; }

 private:
  // Addresses may be few (ulimit, sanitizers), and new memory costs little.
  std::size_t room_for(std::size_t bytes) const override { return 2 * bytes; }

  std::size_t ranks_;
};

constexpr comm::FarMemory::Copier kCopier{kernels::cuda::start_copy, kernels::cuda::finish_copies};

class GpuArray final : public GrowingArray {
 public:
  GpuArray(std::shared_ptr<kernels::cuda::RankDevice> device, std::size_t bytes)
      : device_(std::move(device)), memory_(device_->gpu(), bytes), far_(memory_.data(), bytes, kCopier) {}
  ~GpuArray() override {
    try {
      device_->finish();  // nobody may read it any more
    } catch (...) {       // a GPU that has failed reads nothing
    }
  }
  std::byte* data() const override { return memory_.data(); }
  void grow(std::size_t bytes) override { memory_.grow(bytes); }
  void discard(std::size_t, std::size_t) noexcept override {}

 private:
  std::shared_ptr<kernels::cuda::RankDevice> device_;
  kernels::cuda::DeviceArray memory_;
  comm::FarMemory far_;
};

class GpuMemory final : public KvMemory {
 public:
  explicit GpuMemory(int gpu) : device_(std::make_shared<kernels::cuda::RankDevice>(gpu)) {}
  std::size_t bytes() const override { return device_->memory_bytes(); }
  std::unique_ptr<GrowingArray> reserve(std::size_t bytes) override {
    return std::make_unique<GpuArray>(device_, bytes);
  }
  void copy(std::byte* to, const std::byte* from, std::size_t bytes) override { device_->copy(to, from, bytes); }
  void fill_zero(std::byte* to, std::size_t bytes) override { device_->fill_zero(to, bytes); }
  void copy_in(std::byte* to, const std::byte* host, std::size_t bytes) override { device_->copy_in(to, host, bytes); }
  void copy_out(std::byte* host, const std::byte* from, std::size_t bytes) override {
    device_->copy_out(host, from, bytes);
  }
  void finish() override { device_->finish(); }
  kernels::cuda::RankDevice* device() const override { return device_.get(); }

 private:
  // To free and to take memory waits for the GPU.
  std::size_t room_for(std::size_t) const override { return bytes(); }

  std::shared_ptr<kernels::cuda::RankDevice> device_;
};

}  // namespace

std::shared_ptr<GrowingArray> KvMemory::workspace(std::size_t number, std::size_t bytes) {
  Workspace& workspace = workspaces_[number];
  if (!workspace.array || bytes > workspace.room) {
    workspace = {};
    const std::size_t room = room_for(bytes);
    workspace.array = reserve(room);
    workspace.room = room;
  }
  workspace.array->grow(bytes);
  workspace.bytes = std::max(workspace.bytes, bytes);
  return workspace.array;
}

std::size_t KvMemory::workspace_bytes() const {
  std::size_t sum = 0;
  for (const Workspace& workspace : workspaces_) sum += workspace.bytes;
  return sum;
}

std::shared_ptr<KvMemory> host_memory(int ranks) { return std::make_shared<HostMemory>(ranks); }

void check_gpu(int gpu) {
  base::require(gpu >= KvCache::kHost, "gpu = {}; accepted: KvCache::kHost or the index of a GPU", gpu);
}

std::shared_ptr<KvMemory> memory_of(int gpu, int ranks) {
  check_gpu(gpu);
  if (gpu == KvCache::kHost) return host_memory(ranks);
  return std::make_shared<GpuMemory>(gpu);
}

}  // namespace treeattn::parallel
