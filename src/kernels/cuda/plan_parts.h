// SPDX-License-Identifier: Apache-2.0
// From a checked call to a launch, in parts: CudaPlan puts them together once, a rank of a sharded cache at every step.
#pragma once

#include "kernels/cuda/launch.h"
#include "kernels/cuda/work.h"
#include "kernels/problem.h"

namespace treeattn::kernels::cuda {

// Everything that needs no memory of its own. Left null: tables, lengths, positions, slopes, sinks, work, workspace and
// results.
AttentionParams params_of(const Problem& problem);

// Floats of AttentionParams::item_states.
std::size_t workspace_floats(const Problem& problem, const Work& work);

// The kernel for the call, ready to be started on the current GPU, with what it wants to know of K and V put into
// params, whose pointers to q, K and V are set. split_work(problem, launch.limits, launch.slots) cuts the call for it.
Launch prepare_launch(const Problem& problem, int multiprocessors, AttentionParams& params);
// Starts it on the current GPU; `items` blocks.
void start(const Launch& launch, AttentionParams& params, std::size_t items, void* stream);

}  // namespace treeattn::kernels::cuda
