// SPDX-License-Identifier: Apache-2.0
// Memory that the processor cannot read itself, as a GPU's: messages between threads may lie there all the same.
#pragma once

#include <cstddef>

namespace treeattn::comm {

// Makes a range of addresses known as such, as long as it lives.
class FarMemory {
 public:
  // to[0, bytes) = from[0, bytes), either or both of them far; done when it returns.
  using Copy = void (*)(void* to, const void* from, std::size_t bytes);

  FarMemory(const std::byte* begin, std::size_t bytes, Copy copy);
  ~FarMemory();
  FarMemory(const FarMemory&) = delete;
  FarMemory& operator=(const FarMemory&) = delete;

 private:
  const std::byte* begin_;
};

bool is_far(const void* address);
// std::memcpy for memory that may be far.
void copy_bytes(void* to, const void* from, std::size_t bytes);

}  // namespace treeattn::comm
