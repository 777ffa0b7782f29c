// SPDX-License-Identifier: Apache-2.0
#include "comm/far_memory.h"

#include <cstring>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <shared_mutex>

namespace treeattn::comm {
namespace {

struct Range {
  std::size_t bytes = 0;
  FarMemory::Copy copy = nullptr;
};

// By where they begin.
std::map<const void*, Range, std::less<>> ranges;
std::shared_mutex mutex;

// Null where the processor can read it.
FarMemory::Copy copy_for(const void* address) {
  const std::shared_lock lock(mutex);
  const auto after = ranges.upper_bound(address);
  if (after == ranges.begin()) return nullptr;
  const auto& [begin, range] = *std::prev(after);
  const auto offset =
      static_cast<std::size_t>(static_cast<const std::byte*>(address) - static_cast<const std::byte*>(begin));
  return offset < range.bytes ? range.copy : nullptr;
}

}  // namespace

FarMemory::FarMemory(const std::byte* begin, std::size_t bytes, Copy copy) : begin_(begin) {
  const std::unique_lock lock(mutex);
  ranges[begin] = {bytes, copy};
}

FarMemory::~FarMemory() {
  const std::unique_lock lock(mutex);
  ranges.erase(begin_);
}

bool is_far(const void* address) { return copy_for(address) != nullptr; }

void copy_bytes(void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  FarMemory::Copy copy = copy_for(from);
  if (copy == nullptr) copy = copy_for(to);
  copy != nullptr ? copy(to, from, bytes) : static_cast<void>(std::memcpy(to, from, bytes));
}

}  // namespace treeattn::comm
