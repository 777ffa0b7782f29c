// SPDX-License-Identifier: Apache-2.0
#include "launched_ranks.h"

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/checksum.h"
#include "command.h"
#include "command_line.h"
#include "parallel/agree.h"
#include "treeattn/attention.h"
#include "treeattn/error.h"
#include "treeattn/thread_pool.h"

namespace treeattn::tools {
namespace {

// Where there are both, MPI's are the nearer launcher's, except in a worker of torchrun: it has inherited them from
// srun or mpirun, which started torchrun. And what was built without MPI has no choice.
bool meets_by_mpi() {
  const bool torchrun = std::getenv("TORCHELASTIC_RUN_ID") != nullptr;
  return launched_by_mpi() && !(launched_by_tcp() && (torchrun || !mpi_available()));
}

}  // namespace

bool launched() { return launched_by_mpi() || launched_by_tcp(); }

int launch_rank() {
  if (!launched()) return 0;
  const std::vector<const char*> names =
      meets_by_mpi() ? std::vector{"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"} : std::vector{"RANK"};
  for (const char* name : names) {
    if (const char* text = std::getenv(name)) return std::atoi(text);
  }
  return 0;
}

std::shared_ptr<Communicator> meet_ranks(const CommandLine& command, const RankOptions& options, int rank_count) {
  active_isa();  // a TREEATTN_ISA that is wrong here alone: later the others would wait, and nobody would say why
  std::shared_ptr<Communicator> world = meets_by_mpi() ? mpi_communicator(options) : tcp_communicator(options);
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

void on_all_or_none(Communicator& world, const std::function<void()>& work) {
  std::exception_ptr error;
  std::string own;
  try {
    work();
  } catch (const std::exception& what) {
    error = std::current_exception();
    own = what.what();
  }
  const std::string failure = parallel::failure_of_any(world, own);
  if (error) std::rethrow_exception(error);
  if (!failure.empty()) throw Unavailable(failure);
}

int cores_of_thread(int ranks) { return std::max(1, ThreadPool::available_cores() / ranks); }

}  // namespace treeattn::tools
