// SPDX-License-Identifier: Apache-2.0
#include "launched_ranks.h"

#include <string>
#include <vector>

#include "base/check.h"
#include "base/checksum.h"
#include "command.h"
#include "command_line.h"
#include "parallel/agree.h"

namespace treeattn::tools {

std::shared_ptr<Communicator> meet_ranks(const CommandLine& command, const RankOptions& options, int rank_count) {
  std::shared_ptr<Communicator> world = mpi_communicator(options);
  met_other_ranks = true;
  // By itself: other commands have other options.
  parallel::require_same(*world, base::crc32c_of_texts(std::vector{command.full_name()}), "command");
  const auto told = command.told_to_all_ranks();
  std::vector<parallel::Given> given;
  for (const auto& [name, values] : told) given.push_back({name.c_str(), base::crc32c_of_texts(values)});
  parallel::require_same(*world, given);
  base::require(rank_count == 0 || rank_count == world->size(),
                "--ranks is {}; accepted under an MPI launcher: its processes, {}", rank_count, world->size());
  return world;
}

}  // namespace treeattn::tools
