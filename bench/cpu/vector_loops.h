// SPDX-License-Identifier: Apache-2.0
// Loops of nothing but one vector instruction, of those the kernels are made of. Each architecture has its own file.
#pragma once

#include <string_view>
#include <vector>

#include "treeattn/dtype.h"

namespace treeattn::bench {

struct VectorLoop {
  std::string_view name;
  bool usable;                   // whether this processor has the instruction
  double (*burst)(long rounds);  // runs it over and over, in independent chains; returns the instructions done
};

// None on an architecture without a file of its own.
std::vector<VectorLoop> vector_loops();

// One chain of instructions that wait for each other; returns the cycles they took. Null where there are no loops.
using ClockBurst = double (*)(long rounds);
ClockBurst clock_burst();

struct InstructionCount {
  std::string_view name;  // of a loop
  double count;
};

// What decode attention takes for 32 bytes, 16 of K and 16 of V, besides the softmax.
struct KernelCount {
  DType dtype;  // of K and V
  int group;    // query heads to a head of K and V
  std::vector<InstructionCount> k, v;
};

// Counted in the kernels' sources; empty where nobody has counted.
std::vector<KernelCount> kernel_counts();

}  // namespace treeattn::bench
