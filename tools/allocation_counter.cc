// SPDX-License-Identifier: Apache-2.0
// The counting operator new. It measures the library from outside, so the figure does not rest on the library's own
// bookkeeping. Sizes are what malloc really set aside, as that is known again when the memory is given back; of aligned
// blocks, what was asked for.
#include "allocation_counter.h"

#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace treeattn::tools {

namespace {

// Counts bytes handed to it. Thread-safe. What is removed may have been there before the count began: differences of
// figures hold all the same.
class AllocationMeter {
 public:
  void add(std::size_t bytes) {
    const auto more = static_cast<std::ptrdiff_t>(bytes);
    const std::ptrdiff_t now = current_.fetch_add(more, std::memory_order_relaxed) + more;
    std::ptrdiff_t peak = peak_.load(std::memory_order_relaxed);
    while (now > peak && !peak_.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
    }
  }
  void remove(std::size_t bytes) { current_.fetch_sub(static_cast<std::ptrdiff_t>(bytes), std::memory_order_relaxed); }
  // Starts the peak again from what is allocated now.
  void reset_peak() { peak_.store(current_.load(std::memory_order_relaxed), std::memory_order_relaxed); }

  std::size_t current() const { return static_cast<std::size_t>(current_.load(std::memory_order_relaxed)); }
  std::size_t peak() const { return static_cast<std::size_t>(peak_.load(std::memory_order_relaxed)); }

 private:
  std::atomic<std::ptrdiff_t> current_{0};
  std::atomic<std::ptrdiff_t> peak_{0};
};

// Usable from the first new to the last delete.
constinit std::atomic<bool> watched{false};
constinit AllocationMeter meter;

void count_new(std::size_t bytes) {
  if (watched.load(std::memory_order_relaxed)) meter.add(bytes);
}
void count_deleted(std::size_t bytes) {
  if (watched.load(std::memory_order_relaxed)) meter.remove(bytes);
}

}  // namespace

AllocationWatch::AllocationWatch() : before_(meter.current()) {
  meter.reset_peak();
  watched = true;
}

AllocationWatch::~AllocationWatch() { watched = false; }

std::size_t AllocationWatch::peak() const { return meter.peak() - before_; }

RankPeak::RankPeak(Communicator& world) : world_(world), shared_(world.transport() == "threads") {
  world_.barrier();
  if (!shared_ || world.rank() == 0) watch_.emplace();
  world_.barrier();  // nobody allocates before that
}

std::size_t RankPeak::bytes() const {
  world_.barrier();
  if (!watch_) return 0;
  return watch_->peak() / static_cast<std::size_t>(shared_ ? world_.size() : 1);
}

namespace {

void* counted(void* memory) {
  if (memory != nullptr) count_new(::malloc_usable_size(memory));
  return memory;
}

void* allocate(std::size_t bytes) noexcept { return counted(std::malloc(bytes == 0 ? 1 : bytes)); }

void release(void* memory) noexcept {
  if (memory == nullptr) return;
  count_deleted(::malloc_usable_size(memory));
  std::free(memory);
}

// malloc's usable size of an aligned block holds up to another alignment of addresses nobody touches, 2 MiB of them for
// a large buffer. So what was asked for is counted, and stands in front of the block.
void* allocate(std::size_t bytes, std::size_t alignment) noexcept {
  alignment = std::max(alignment, 2 * sizeof(std::size_t));
  void* memory = nullptr;
  if (::posix_memalign(&memory, alignment, alignment + bytes) != 0) return nullptr;
  void* block = static_cast<std::byte*>(memory) + alignment;
  static_cast<std::size_t*>(block)[-1] = bytes;
  count_new(bytes);
  return block;
}

void release(void* block, std::size_t alignment) noexcept {
  if (block == nullptr) return;
  alignment = std::max(alignment, 2 * sizeof(std::size_t));
  count_deleted(static_cast<std::size_t*>(block)[-1]);
  std::free(static_cast<std::byte*>(block) - alignment);
}

void* or_throw(void* memory) {
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace
}  // namespace treeattn::tools

// The array and nothrow forms of the standard library all end in these.
void* operator new(std::size_t bytes) { return treeattn::tools::or_throw(treeattn::tools::allocate(bytes)); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return treeattn::tools::or_throw(treeattn::tools::allocate(bytes, static_cast<std::size_t>(alignment)));
}
void operator delete(void* memory) noexcept { treeattn::tools::release(memory); }
void operator delete(void* memory, std::size_t) noexcept { treeattn::tools::release(memory); }
void operator delete(void* memory, std::align_val_t alignment) noexcept {
  treeattn::tools::release(memory, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory, std::size_t, std::align_val_t alignment) noexcept {
  treeattn::tools::release(memory, static_cast<std::size_t>(alignment));
}
