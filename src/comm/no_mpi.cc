// SPDX-License-Identifier: Apache-2.0
#include "treeattn/communicator.h"
#include "treeattn/error.h"

namespace treeattn {
namespace {

[[noreturn]] void refuse() {
  throw Unavailable("mpi_communicator: this build has no MPI; accepted: a build with TREEATTN_MPI=ON, or run_ranks()");
}

}  // namespace

std::shared_ptr<Communicator> mpi_communicator(RankOptions) { refuse(); }
std::shared_ptr<Communicator> mpi_communicator(int, RankOptions) { refuse(); }
bool mpi_available() { return false; }

}  // namespace treeattn
