// SPDX-License-Identifier: Apache-2.0
// Counts what this program allocates: allocation_counter.cc replaces the global operator new and delete.
#pragma once

#include <cstddef>
#include <optional>

#include "treeattn/communicator.h"

namespace treeattn::tools {

// While it lives, every allocation of this program through operator new is counted, the library's included. At other
// times none is: threads would wait for each other at the counter, and that would be part of what is timed. One at a
// time.
class AllocationWatch {
 public:
  AllocationWatch();
  ~AllocationWatch();
  AllocationWatch(const AllocationWatch&) = delete;
  AllocationWatch& operator=(const AllocationWatch&) = delete;

  // The most that was held at any time since, beyond what was held before.
  std::size_t peak() const;

 private:
  std::size_t before_;
};

// What a rank allocates at its peak. Ranks that are threads share the counter: the first one reads it for all, and they
// get an equal part each.
class RankPeak {
 public:
  // Collective: counting begins.
  explicit RankPeak(Communicator& world);
  // Collective. On ranks that do not read the counter 0.
  std::size_t bytes() const;

 private:
  Communicator& world_;
  bool shared_;
  std::optional<AllocationWatch> watch_;  // of the one that reads
};

}  // namespace treeattn::tools
