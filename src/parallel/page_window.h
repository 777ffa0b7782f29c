// SPDX-License-Identifier: Apache-2.0
// Pages between GPUs of a machine where messages do not reach them, or reach them by way of the host
// (comm/far_memory.h): between processes, and between threads on several GPUs. Each rank copies what it gives into
// memory that the others reach, a part at a time, and they take it from there.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "kernels/cuda/ranks/lent_memory.h"
#include "parallel/kv_memory.h"
#include "parallel/ring_pass.h"
#include "treeattn/communicator.h"

namespace treeattn::parallel {

class PageWindow {
 public:
  // What it takes of a GPU: one part is read while the next is written.
  static constexpr std::size_t kPartBytes = std::size_t{32} << 20;
  static constexpr std::size_t kBytes = 2 * kPartBytes;

  // Collective. Null on every rank where there is no need for one, as all are threads with one GPU or without any, or
  // where they are on several machines, or one has no GPU, no room on it, or does not reach another's.
  static std::unique_ptr<PageWindow> make(Communicator& communicator, std::shared_ptr<KvMemory> memory);
  ~PageWindow();

  // Memory of this rank's GPU.
  using Pages = std::vector<std::span<std::byte>>;

  // Collective. pages [ranks]: where what a rank gives lies, or is to lie. A rank's own is read, what is on the
  // device's stream included; the rest is there when the device has finished. The sizes are the same on all ranks.
  void exchange(Communicator& communicator, std::span<const Pages> pages);

 private:
  friend class WindowPass;
  PageWindow(std::shared_ptr<KvMemory> memory, std::unique_ptr<kernels::cuda::LentMemory> lent);

  std::shared_ptr<KvMemory> memory_;
  std::unique_ptr<kernels::cuda::LentMemory> lent_;
  std::size_t turn_ = 0;
};

// Pages that ranks pass on to their right neighbours through their windows: what the messages of a ring do elsewhere.
class WindowPass {
 public:
  // Collective. Nothing on the device may still use the window.
  WindowPass(Communicator& communicator, const RingPlace& place, PageWindow& window);

  // Gives some to the right neighbour and takes what the left one gives in the same turn, which must have the same
  // sizes; work() meanwhile. What is taken is there when it returns.
  void turn(const PageWindow::Pages& give, const PageWindow::Pages& take, const std::function<void()>& work);
  // Waits until the right neighbour has taken everything.
  void finish();

 private:
  void tell(int rank);
  void hear(int rank);

  Communicator& communicator_;
  const RingPlace& place_;
  PageWindow& window_;
  const Traffic before_;
  std::size_t given_ = 0, answered_ = 0, taken_ = 0;  // parts
  std::vector<std::size_t> sent_;                     // bytes of each turn
};

}  // namespace treeattn::parallel
