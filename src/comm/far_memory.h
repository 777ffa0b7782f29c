// SPDX-License-Identifier: Apache-2.0
// Memory that the processor cannot read itself, as a GPU's: messages between threads may lie there all the same.
#pragma once

#include <cstddef>

namespace treeattn::comm {

// Makes a range of addresses known as such, as long as it lives.
class FarMemory {
 public:
  struct Copier {
    // to[0, bytes) = from[0, bytes), either or both of them far; done when finish() of the same thread has returned.
    void (*start)(void* to, const void* from, std::size_t bytes);
    void (*finish)();
  };

  FarMemory(const std::byte* begin, std::size_t bytes, const Copier& copier);
  ~FarMemory();
  FarMemory(const FarMemory&) = delete;
  FarMemory& operator=(const FarMemory&) = delete;

 private:
  const std::byte* begin_;
};

// Null where the processor can read it.
const FarMemory::Copier* copier_of(const void* address);

}  // namespace treeattn::comm
