// SPDX-License-Identifier: Apache-2.0
// Cores for ranks that are processes: what run_ranks() does for threads.
#pragma once

#include "treeattn/communicator.h"

namespace treeattn::parallel {

// Collective. Processes of one machine that may use the same cores, as a launcher that binds none leaves them, get each
// its own part of these: else the pools of all would pin their threads to the same ones. Returns how many this one has.
int take_own_cores(Communicator& communicator);

}  // namespace treeattn::parallel
