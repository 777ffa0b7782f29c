// SPDX-License-Identifier: Apache-2.0
// Counts what this program allocates: allocation_counter.cc replaces the global operator new and delete.
#pragma once

#include "base/memory_meter.h"

namespace treeattn::tools {

// Every allocation of this program through operator new, the library's included.
base::AllocationMeter& program_allocations();

}  // namespace treeattn::tools
