// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "base/round_up.h"
#include "base/this_process.h"
#include "kernels/cuda/device_buffer.h"
#include "kernels/cuda/ranks/lent_memory.h"
#include "treeattn/error.h"

namespace treeattn::kernels::cuda {
namespace {

constexpr std::size_t kTurns = 2;
// What the driver lends to other processes: smaller things would lie in one piece with others.
constexpr std::size_t kLent = std::size_t{2} << 20;

// What ranks of this process share.
struct Block {
  Block(int on_gpu, std::size_t bytes) : gpu(on_gpu), memory(bytes) {
    for (cudaEvent_t& event : marks) check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "event");
  }
  ~Block() {
    for (cudaEvent_t event : marks) cudaEventDestroy(event);
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  int gpu;
  DeviceBuffer memory;
  std::array<cudaEvent_t, kTurns> marks{};
};
using SharedBlock = std::shared_ptr<Block>;

// Memory that cannot be freed and may be lent again. Not destroyed with the process: the driver may be gone by then.
struct Kept {
  std::mutex mutex;
  std::vector<SharedBlock> blocks;
};
Kept& kept() {
  static auto* const all = new Kept;
  return *all;
}

SharedBlock take_kept(int gpu, std::size_t bytes) {
  const std::lock_guard lock(kept().mutex);
  auto& blocks = kept().blocks;
  const auto found = std::ranges::find_if(
      blocks, [&](const SharedBlock& block) { return block->gpu == gpu && block->memory.bytes() == bytes; });
  if (found == blocks.end()) return nullptr;
  SharedBlock out = std::move(*found);
  blocks.erase(found);
  return out;
}

void keep(SharedBlock block) {
  const std::lock_guard lock(kept().mutex);
  kept().blocks.push_back(std::move(block));
}

struct Where {
  std::uint64_t process = 0;
  const SharedBlock* block = nullptr;  // for threads of that process
  int gpu = 0;
  cudaIpcMemHandle_t handle{};
};
static_assert(sizeof(Where) <= sizeof(LentMemory::Address));

Where where(const LentMemory::Address& address) {
  Where out;
  std::memcpy(&out, address.data(), sizeof out);
  return out;
}

// From the current GPU to another.
void enable_access(int gpu, std::size_t rank) {
  const cudaError_t error = cudaDeviceEnablePeerAccess(gpu, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();
  } else {
    check(error, fmt::format("memory of rank {}, on GPU {}", rank, gpu).c_str());
  }
}

}  // namespace

struct LentMemory::Impl {
  int gpu = 0;
  Others others = Others::kRead;
  SharedBlock block;
  std::vector<std::byte*> peers;  // [ranks] everybody's, as this GPU sees it
  std::vector<void*> opened;      // of these, what other processes lend
  std::vector<SharedBlock> held;  // and what threads do: it stays when they go, as someone may be using it
  bool lent = false;              // other processes may have this one's open
};

LentMemory::LentMemory(int gpu, std::size_t bytes, Others others) : impl_(std::make_unique<Impl>()) {
  const UseDevice use(gpu);
  const std::size_t whole = base::round_up(bytes, kLent);
  impl_->gpu = gpu;
  impl_->others = others;
  impl_->block = take_kept(gpu, whole);
  if (!impl_->block) impl_->block = std::make_shared<Block>(gpu, whole);
}

LentMemory::~LentMemory() {
  int before = 0;
  cudaGetDevice(&before);
  cudaSetDevice(impl_->gpu);
  for (void* memory : impl_->opened) cudaIpcCloseMemHandle(memory);
  if (impl_->lent && impl_->others == Others::kRead) {
    keep(std::move(impl_->block));
  } else if (impl_->lent) {
    new SharedBlock(std::move(impl_->block));  // they may write to it yet, having heard of nothing
  }
  impl_->block.reset();
  impl_->held.clear();
  cudaSetDevice(before);
}

LentMemory::Address LentMemory::address() const {
  const UseDevice use(impl_->gpu);
  Where mine;
  mine.process = base::this_process();
  mine.block = &impl_->block;
  mine.gpu = impl_->gpu;
  if (cudaIpcGetMemHandle(&mine.handle, impl_->block->memory.as<void>()) != cudaSuccess) {
    cudaGetLastError();  // no other process can reach it then, which open says there
    mine.handle = {};
  }
  Address out{};
  std::memcpy(out.data(), &mine, sizeof mine);
  return out;
}

void LentMemory::connect(std::span<const Address> all) {
  const UseDevice use(impl_->gpu);
  // What this rank still reads of memory that its owner has kept, and lends again now.
  check(cudaDeviceSynchronize(), "work on the GPU");
  // They reach this one even if it does not reach them.
  impl_->lent = std::ranges::any_of(all, [](const Address& a) { return !is_of_this_process(a); });
  for (std::size_t r = 0; r < all.size(); ++r) {
    const Where other = where(all[r]);
    void* memory = nullptr;
    if (!is_of_this_process(all[r])) {
      check(cudaIpcOpenMemHandle(&memory, other.handle, cudaIpcMemLazyEnablePeerAccess),
            fmt::format("memory of rank {}, of another process", r).c_str());
      impl_->opened.push_back(memory);
    } else {
      if (other.gpu != impl_->gpu) enable_access(other.gpu, r);
      impl_->held.push_back(*other.block);
      memory = impl_->held.back()->memory.as<void>();
    }
    impl_->peers.push_back(static_cast<std::byte*>(memory));
  }
}

void LentMemory::disconnect() {
  const UseDevice use(impl_->gpu);
  for (void* memory : impl_->opened) cudaIpcCloseMemHandle(memory);
  impl_->opened.clear();
  impl_->held.clear();
  impl_->peers.clear();
}

void LentMemory::take_back() { impl_->lent = false; }

bool LentMemory::is_of_this_process(const Address& address) { return where(address).process == base::this_process(); }

bool LentMemory::share_a_gpu(std::span<const Address> all) {
  for (std::size_t a = 0; a < all.size(); ++a) {
    for (std::size_t b = a + 1; b < all.size(); ++b) {
      const Where one = where(all[a]), other = where(all[b]);
      if (one.process == other.process && one.gpu == other.gpu) return true;
    }
  }
  return false;
}

std::byte* LentMemory::own() const { return impl_->block->memory.as<std::byte>(); }
std::byte* LentMemory::of(std::size_t rank) const { return impl_->peers[rank]; }

void LentMemory::mark(unsigned turn, void* stream) {
  const UseDevice use(impl_->gpu);
  check(cudaEventRecord(impl_->block->marks[turn % kTurns], static_cast<cudaStream_t>(stream)), "event");
}

void LentMemory::wait_for_marks(unsigned turn, void* stream) const {
  const UseDevice use(impl_->gpu);
  for (const SharedBlock& other : impl_->held) {
    if (other == impl_->block) continue;  // this stream comes after it anyway
    check(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), other->marks[turn % kTurns], 0), "event");
  }
}

}  // namespace treeattn::kernels::cuda
