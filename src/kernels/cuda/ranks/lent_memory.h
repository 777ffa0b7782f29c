// SPDX-License-Identifier: Apache-2.0
// Memory of a GPU that the other ranks of a machine reach, and theirs as this GPU sees it: between processes through
// CUDA IPC, between threads directly. This header needs no CUDA.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <span>

namespace treeattn::kernels::cuda {

// Made by all ranks together: construct, hand everybody's address() to everybody, connect(). Throws Unavailable naming
// what failed.
class LentMemory {
 public:
  // What another rank needs to reach it: plain bytes.
  using Address = std::array<std::byte, 128>;
  // What the others do with it. Memory that another process may have open cannot be freed: what they only read is kept
  // for the next that is made, the rest until the process ends.
  enum class Others { kRead, kWrite };

  // Content undefined.
  LentMemory(int gpu, std::size_t bytes, Others others);
  ~LentMemory();
  LentMemory(const LentMemory&) = delete;
  LentMemory& operator=(const LentMemory&) = delete;

  Address address() const;
  // all [ranks], whose owners must all be there yet. Throws Unavailable where a GPU cannot reach another.
  void connect(std::span<const Address> all);
  // Lets go of the others' memory. Nothing on the GPU may use it any more.
  void disconnect();
  // To be called once all ranks have: nobody has this one's open.
  void take_back();
  // Whether it is memory of this process, which is reached by its address in the place of CUDA IPC. Only a thread of
  // this process knows such a one: of anybody else it must not be taken.
  static bool is_of_this_process(const Address& address);
  // Whether two of these ranks are threads of one process with the same GPU.
  static bool share_a_gpu(std::span<const Address> all);

  std::byte* own() const;
  // That of a rank this one is connected to, its own included.
  std::byte* of(std::size_t rank) const;

  // For threads, without the host: what is on the stream up to now is turn `turn` of this rank, of which the last two
  // are remembered. And the stream goes on when all threads of this process that this one is connected to have marked
  // the turn, which they must have done before this call.
  void mark(unsigned turn, void* stream);
  void wait_for_marks(unsigned turn, void* stream) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace treeattn::kernels::cuda
