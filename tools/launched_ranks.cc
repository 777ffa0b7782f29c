// SPDX-License-Identifier: Apache-2.0
#include "launched_ranks.h"

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/checksum.h"
#include "command.h"
#include "command_line.h"
#include "parallel/agree.h"

namespace treeattn::tools {
namespace {

std::uint32_t digest(const std::vector<std::string>& texts) {
  std::uint32_t out = 0;
  for (const std::string& text : texts) {
    out = base::crc32c(std::as_bytes(std::span(text.c_str(), text.size() + 1)), out);  // with what ends it
  }
  return out;
}

}  // namespace

std::shared_ptr<Communicator> meet_ranks(const CommandLine& command, const RankOptions& options, int rank_count) {
  std::shared_ptr<Communicator> world = mpi_communicator(options);
  met_other_ranks = true;
  // By itself: other commands have other options.
  parallel::require_same(*world, digest({command.full_name()}), "command");
  const auto told = command.told_to_all_ranks();
  std::vector<parallel::Given> given;
  for (const auto& [name, values] : told) given.push_back({name.c_str(), digest(values)});
  parallel::require_same(*world, given);
  base::require(rank_count == 0 || rank_count == world->size(),
                "--ranks is {}; accepted under an MPI launcher: its processes, {}", rank_count, world->size());
  return world;
}

}  // namespace treeattn::tools
