// SPDX-License-Identifier: Apache-2.0
// Where the pages of a rank lie: in the host's memory or in a GPU's.
#pragma once

#include <array>
#include <cstddef>
#include <memory>

#include "kernels/cuda/ranks/rank_device.h"

namespace treeattn::parallel {

// An array that grows without moving.
class GrowingArray {
 public:
  virtual ~GrowingArray() = default;
  virtual std::byte* data() const = 0;  // null where nothing was reserved
  // Makes at least the first `bytes` usable. Requires no more than were reserved. Throws std::bad_alloc.
  virtual void grow(std::size_t bytes) = 0;
  // Gives the memory of a part back, as far as it can. That of a GPU stays with the array.
  virtual void discard(std::size_t first, std::size_t bytes) noexcept = 0;
};

// Everything is in order. On a GPU it may be under way when a call returns: finish() waits, and until then the host's
// side of a copy must stay as it is.
class KvMemory {
 public:
  virtual ~KvMemory() = default;
  // How much there is of it, for one rank at most.
  virtual std::size_t bytes() const = 0;
  // Throws std::bad_alloc when there are not so many addresses.
  virtual std::unique_ptr<GrowingArray> reserve(std::size_t bytes) = 0;
  virtual void copy(std::byte* to, const std::byte* from, std::size_t bytes) = 0;
  virtual void fill_zero(std::byte* to, std::size_t bytes) = 0;
  // From and to the host's memory.
  virtual void copy_in(std::byte* to, const std::byte* host, std::size_t bytes) = 0;
  virtual void copy_out(std::byte* host, const std::byte* from, std::size_t bytes) = 0;
  virtual void finish() = 0;
  // Null where it is the host's.
  virtual kernels::cuda::RankDevice* device() const = 0;

  // Memory for what a call works with, kept from call to call; content undefined. Memory of an earlier call that is too
  // short is left to whoever still has it.
  static constexpr std::size_t kWorkspaces = 4;
  std::shared_ptr<GrowingArray> workspace(std::size_t number, std::size_t bytes);
  // The next call gets other memory: messages that were given up may still write to this, which is theirs from now on.
  void forget_workspaces() noexcept { workspaces_ = {}; }
  // What it has grown to, all of it.
  std::size_t workspace_bytes() const;

 private:
  // Addresses to reserve for a workspace of so many bytes, in which it can grow.
  virtual std::size_t room_for(std::size_t bytes) const = 0;

  struct Workspace {
    std::shared_ptr<GrowingArray> array;
    std::size_t room = 0;
    std::size_t bytes = 0;
  };
  std::array<Workspace, kWorkspaces> workspaces_;
};

// ranks: of this process, this one included.
std::shared_ptr<KvMemory> host_memory(int ranks = 1);
// Throws InvalidArgument for what is neither the index of a GPU nor KvCache::kHost. Whether it is there is not asked.
void check_gpu(int gpu);
// gpu: its index, or KvCache::kHost: the host's memory. Throws Unavailable where there is no such GPU.
std::shared_ptr<KvMemory> memory_of(int gpu, int ranks = 1);

}  // namespace treeattn::parallel
