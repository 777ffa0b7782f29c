// SPDX-License-Identifier: Apache-2.0
// The split of a call over blocks: pure numbers, the same on every machine.
#pragma once

#include <vector>

#include "kernels/cuda/params.h"
#include "kernels/problem.h"

namespace treeattn::kernels::cuda {

struct Work {
  std::vector<WorkItem> items;  // in the order they are launched
  std::vector<MergeGroup> groups;
  int rows_per_item = 0;
};

// slots: blocks that run at the same time. How it is cut changes no bits.
Work split_work(const Problem& problem, ItemLimits limits, int slots);

}  // namespace treeattn::kernels::cuda
