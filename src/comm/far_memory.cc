// SPDX-License-Identifier: Apache-2.0
#include "comm/far_memory.h"

#include <atomic>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <shared_mutex>

namespace treeattn::comm {
namespace {

struct Range {
  std::size_t bytes = 0;
  const FarMemory::Copier* copier = nullptr;
};

// By where they begin.
std::map<const std::byte*, Range, std::less<>> ranges;
std::shared_mutex mutex;
std::atomic<bool> any = false;  // so that ranks without a GPU need not meet at the mutex

}  // namespace

FarMemory::FarMemory(const std::byte* begin, std::size_t bytes, const Copier& copier) : begin_(begin) {
  const std::unique_lock lock(mutex);
  ranges[begin] = {bytes, &copier};
  any = true;
}

FarMemory::~FarMemory() {
  const std::unique_lock lock(mutex);
  ranges.erase(begin_);
  any = !ranges.empty();
}

const FarMemory::Copier* copier_of(const void* address) {
  if (!any) return nullptr;
  const auto* at = static_cast<const std::byte*>(address);
  const std::shared_lock lock(mutex);
  const auto after = ranges.upper_bound(at);
  if (after == ranges.begin()) return nullptr;
  const auto& [begin, range] = *std::prev(after);
  return static_cast<std::size_t>(at - begin) < range.bytes ? range.copier : nullptr;
}

}  // namespace treeattn::comm
