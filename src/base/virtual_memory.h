// SPDX-License-Identifier: Apache-2.0
// Addresses first, memory later: an array that grows without moving and gives back the middle of itself. Linux only.
#pragma once

#include <cstddef>

namespace treeattn::base {

// Movable, not copyable. A moved-from one is empty.
class VirtualMemory {
 public:
  VirtualMemory() = default;
  // Reserves addresses, no memory. Throws std::bad_alloc when there are not so many left.
  explicit VirtualMemory(std::size_t bytes);
  ~VirtualMemory();
  VirtualMemory(VirtualMemory&& other) noexcept;
  VirtualMemory& operator=(VirtualMemory&& other) noexcept;
  VirtualMemory(const VirtualMemory&) = delete;
  VirtualMemory& operator=(const VirtualMemory&) = delete;

  std::byte* data() const { return data_; }  // aligned to 2 MiB; null when empty
  std::size_t reserved() const { return reserved_; }
  std::size_t usable() const { return usable_; }

  // Makes at least the first `bytes` usable; what was not before reads as zero. Never moves, never shrinks. Memory is
  // taken when first touched. Requires bytes <= reserved(). Throws std::bad_alloc.
  void grow(std::size_t bytes);
  // Gives the memory of [first, first + bytes) back, as far as whole pages of the kernel lie inside; those then read as
  // zero. Requires first + bytes <= usable().
  void discard(std::size_t first, std::size_t bytes) noexcept;

 private:
  void swap(VirtualMemory& other) noexcept;

  void* mapping_ = nullptr;
  std::size_t mapped_ = 0;
  std::byte* data_ = nullptr;
  std::size_t reserved_ = 0;
  std::size_t usable_ = 0;
};

}  // namespace treeattn::base
