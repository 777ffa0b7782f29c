// SPDX-License-Identifier: Apache-2.0
// Counts what this program allocates: allocation_counter.cc replaces the global operator new and delete.
#pragma once

#include <cstddef>

#include "base/memory_meter.h"
#include "treeattn/communicator.h"

namespace treeattn::tools {

// Every allocation of this program through operator new, the library's included.
base::AllocationMeter& program_allocations();

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
  bool shared_, reads_;
  std::size_t before_;
};

}  // namespace treeattn::tools
