// SPDX-License-Identifier: Apache-2.0
// From a checked call to a launch, in parts: CudaPlan puts them together once, a rank of a sharded cache at every step.
#pragma once

#include "kernels/cuda/decode/work.h"
#include "kernels/cuda/launch.h"
#include "kernels/problem.h"

namespace treeattn::kernels::cuda {

// Everything that needs no memory of its own. Left null: tables, lengths, positions, slopes, sinks, work, workspace and
// results.
AttentionParams params_of(const Problem& problem);

// The kernel for the call, ready to be started on the current GPU, with what it wants to know of K and V put into
// params, whose pointers to q, K and V are set.
Launch prepare_launch(const Problem& problem, int multiprocessors, AttentionParams& params);
// Describes K and V to the copy engine as the kernel wants them, for where they lie; false where it cannot serve.
bool make_tensor_maps(const KvView& k, const KvView& v, const Launch& launch, AttentionParams& params);
// The call cut for that kernel.
Work split(const Problem& problem, const Launch& launch);
// Memory of the GPU: a copy of the work's lists, work.workspace_bytes that may hold anything, work.counters zeros.
struct WorkMemory {
  const WorkItem* items = nullptr;
  std::byte* workspace = nullptr;
  unsigned* counters = nullptr;
};
void set_work(const Work& work, const WorkMemory& memory, AttentionParams& params);
// Starts it on the current GPU. early: while the kernel before it is running, if it can wait for that; that kernel may
// write q and the last key of every sequence, and no other.
void start(const Launch& launch, AttentionParams& params, void* stream, bool early = false);

}  // namespace treeattn::kernels::cuda
