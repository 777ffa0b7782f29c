// SPDX-License-Identifier: Apache-2.0
#include "launched_ranks.h"

#include <cstdlib>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/checksum.h"
#include "command.h"
#include "command_line.h"
#include "parallel/agree.h"

namespace treeattn::tools {

bool launched() { return launched_by_mpi() || launched_by_tcp(); }

int launch_rank() {
  if (!launched()) return 0;
  // Those of MPI first: it is MPI that is used then.
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "RANK"}) {
    if (const char* text = std::getenv(name)) return std::atoi(text);
  }
  return 0;
}

std::shared_ptr<Communicator> meet_ranks(const CommandLine& command, const RankOptions& options, int rank_count) {
  std::shared_ptr<Communicator> world = launched_by_mpi() ? mpi_communicator(options) : tcp_communicator(options);
  met_other_ranks = true;
  // By itself: other commands have other options.
  parallel::require_same(*world, base::crc32c_of_texts(std::vector{command.full_name()}), "command");
  const auto told = command.told_to_all_ranks();
  std::vector<parallel::Given> given;
  for (const auto& [name, values] : told) given.push_back({name.c_str(), base::crc32c_of_texts(values)});
  parallel::require_same(*world, given);
  base::require(rank_count == 0 || rank_count == world->size(),
                "--ranks is {}; accepted under a launcher: its processes, {}", rank_count, world->size());
  return world;
}

}  // namespace treeattn::tools
