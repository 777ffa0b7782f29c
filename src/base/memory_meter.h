// SPDX-License-Identifier: Apache-2.0
// How much memory: what a piece of code allocates, and what the whole process has had resident.
#pragma once

#include <atomic>
#include <cstddef>

namespace treeattn::base {

// Counts bytes handed to it. Thread-safe. Whoever wants a figure makes one and passes it to the Buffers it asks about.
// What is removed may have been there before the count began: differences of figures hold all the same.
class AllocationMeter {
 public:
  void add(std::size_t bytes);
  void remove(std::size_t bytes);
  // Starts the peak again from what is allocated now.
  void reset_peak();

  std::size_t current() const { return static_cast<std::size_t>(current_.load(std::memory_order_relaxed)); }
  std::size_t peak() const { return static_cast<std::size_t>(peak_.load(std::memory_order_relaxed)); }

 private:
  std::atomic<std::ptrdiff_t> current_{0};
  std::atomic<std::ptrdiff_t> peak_{0};
};

// Most memory this process has had resident since it started (VmHWM), and what it has now (VmRSS), in bytes. 0 where
// the kernel does not say.
std::size_t peak_resident_bytes();
std::size_t resident_bytes();

}  // namespace treeattn::base
