// SPDX-License-Identifier: Apache-2.0
// Another architecture.
#include "cpu/vector_loops.h"

namespace treeattn::bench {

std::vector<VectorLoop> vector_loops() { return {}; }
ClockBurst clock_burst() { return nullptr; }
std::vector<KernelCount> kernel_counts() { return {}; }

}  // namespace treeattn::bench
