// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cstdlib>

#include "treeattn/communicator.h"

namespace treeattn {

bool launched_by_mpi() {
  // Open MPI; MPICH and others that start by Hydra; launchers that speak PMIx.
  constexpr std::array kSigns{"OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "PMIX_RANK"};
  return std::any_of(kSigns.begin(), kSigns.end(), [](const char* name) { return std::getenv(name) != nullptr; });
}

}  // namespace treeattn
