// SPDX-License-Identifier: Apache-2.0
// Memory of GPUs that all ranks open for each other, or none of them.
#pragma once

#include <string>

#include "kernels/cuda/ranks/lent_memory.h"
#include "treeattn/communicator.h"

namespace treeattn::parallel {

// Threads may have nodes, too: those of NUMA.
bool on_one_machine(const Communicator& communicator);
// Whether ranks may be threads of one process, which reach each other's memory by its address. Of ranks that are
// processes an address would be anything.
bool may_share_memory(const Communicator& communicator);
// Collective. Whether all ranks are threads of this process with the same GPU.
bool share_one_gpu(Communicator& communicator, int gpu);
// Collective. Whether two ranks are threads of one process, no matter which. The driver may let one of them wait until
// all GPUs of the process are done, for instance to free memory: with a kernel that waits for this very rank, if nobody
// sees to it that all are ready before the first one is started.
bool share_a_process(Communicator& communicator);
// Collective. Throws Unavailable on every rank when `failure` is not empty on one.
void require_reached(Communicator& communicator, const std::string& failure);
// Collective. Connects everybody's. mine: null where it could not be made, for the reason in `failure`. Returns whether
// two ranks are threads of one process that share a GPU. Throws Unavailable on every rank when it failed on one.
bool connect_together(Communicator& communicator, kernels::cuda::LentMemory* mine, const std::string& failure);
// Collective. Memory that others have open can be freed only when they have let go of it: after this.
void free_together(Communicator& communicator, kernels::cuda::LentMemory& mine);

}  // namespace treeattn::parallel
