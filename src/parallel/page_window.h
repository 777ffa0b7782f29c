// SPDX-License-Identifier: Apache-2.0
// Pages from every GPU of a machine to every other one where ranks are processes: what messages do between threads
// (comm/far_memory.h). Each rank copies what it gives into memory that the others reach, a part at a time, and takes
// theirs from there.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "kernels/cuda/ranks/lent_memory.h"
#include "parallel/kv_memory.h"
#include "treeattn/communicator.h"

namespace treeattn::parallel {

class PageWindow {
 public:
  // What it takes of a GPU: one part is read while the next is written.
  static constexpr std::size_t kPartBytes = std::size_t{32} << 20;
  static constexpr std::size_t kBytes = 2 * kPartBytes;

  // Collective. Null on every rank where one has no GPU, no room on it, or does not reach another's.
  static std::unique_ptr<PageWindow> make(Communicator& communicator, std::shared_ptr<KvMemory> memory);
  ~PageWindow();

  // Collective. pages [ranks]: where what a rank gives lies on this rank's GPU, or is to lie. A rank's own is read,
  // what is on the device's stream included; the rest is there when the device has finished. The sizes are the same on
  // all.
  using Pages = std::vector<std::span<std::byte>>;
  void exchange(Communicator& communicator, std::span<const Pages> pages);

 private:
  PageWindow(std::shared_ptr<KvMemory> memory, std::unique_ptr<kernels::cuda::LentMemory> lent);

  std::shared_ptr<KvMemory> memory_;
  std::unique_ptr<kernels::cuda::LentMemory> lent_;
  std::size_t turn_ = 0;
};

}  // namespace treeattn::parallel
