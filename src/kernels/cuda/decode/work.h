// SPDX-License-Identifier: Apache-2.0
// The split of a call over blocks: pure numbers, the same on every machine.
#pragma once

#include <vector>

#include "kernels/cuda/params.h"
#include "kernels/problem.h"

namespace treeattn::kernels::cuda {

struct Work {
  std::vector<WorkItem> items;  // in the order they are launched
  ItemGrid grid;                // what they follow from, if they do
  int rows_per_item = 0;
  std::size_t workspace_bytes = 0;  // of all blocks
  std::size_t counters = 0;
  // Prefill only.
  int waiting_levels = 0;          // states of a block that wait at the same time
  std::size_t bad_rows_bytes = 0;  // of the workspace, at its beginning
};

// slots: blocks that run at the same time; busy: how many of them keep the memory busy. How it is cut changes no bits.
Work split_work(const Problem& problem, ItemLimits limits, int slots, int busy);
// The same for prefill, whose items are cut by queries alone.
Work split_prefill(const Problem& problem, int slots);

// Whether the first leaf of every item begins with so many keys, all of them looked at, where first_token has them.
// Only true as long as no length changes.
bool begin_with(const Problem& problem, const Work& work, int tokens);

}  // namespace treeattn::kernels::cuda
