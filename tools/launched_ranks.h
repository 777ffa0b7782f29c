// SPDX-License-Identifier: Apache-2.0
// Ranks that are the processes of a launcher: one of MPI, or one that says in the environment who is who. Else threads.
#pragma once

#include <functional>
#include <memory>

#include "treeattn/communicator.h"

namespace treeattn::tools {

class CommandLine;

bool launched();
// This process's number under a launcher; 0 without one. It may not have met the others yet.
int launch_rank();

// Collective. Throws InvalidArgument on every rank where they were not told the same (CommandLine::told_to_all_ranks),
// naming the options and the ranks, or where --ranks, if it was given (else 0), is not their number.
std::shared_ptr<Communicator> meet_ranks(const CommandLine& command, const RankOptions& options, int rank_count);

// Collective, on threads as well. What fails on one machine alone, for want of memory, of a GPU or of a file, ends all
// ranks, and the first one says where it was. work() must not communicate.
void on_all_or_none(Communicator& world, const std::function<void()>& work);

// Cores that each of so many ranks has for itself where they are threads. To be asked before they are: the thread of a
// rank is held on its own.
int cores_of_thread(int ranks);

}  // namespace treeattn::tools
