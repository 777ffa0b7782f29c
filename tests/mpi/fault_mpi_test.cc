// SPDX-License-Identifier: Apache-2.0
// What fault_test.py has mpirun start: ranks that reduce for ever, until one is lost; then they shrink, go on, and end
// with status 0. They say on the way what the script checks.
//
//   ready RANK PID        reduces from now on
//   lost RANK of SIZE after SECONDS: MESSAGE
//   done RANK SIZE        has gone on with so many
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <thread>

#include "comm_cases.h"

namespace treeattn {
namespace {

int run(Seconds deadline, std::size_t elements) {
  RankOptions options;
  options.deadline = deadline;
  const auto world = mpi_communicator(options);
  std::printf("ready %d %d\n", world->rank(), static_cast<int>(::getpid()));
  std::fflush(stdout);
  auto start = std::chrono::steady_clock::now();
  try {
    for (;;) {
      start = std::chrono::steady_clock::now();
      testing::check_chain(*world, elements);
    }
  } catch (const LostRanks& error) {
    const Seconds took = std::chrono::steady_clock::now() - start;
    for (const int rank : error.ranks()) {
      std::printf("lost %d of %d after %.3f: %s\n", rank, world->size(), took.count(), error.what());
    }
  }
  const auto rest = world->shrink();
  // A few large ones: under a sanitizer, on a machine that others use, many would outlast the script's patience.
  for (int i = 0; i < 100; ++i) testing::check_chain(*rest, i < 5 ? elements : 1);
  for (const auto& one : testing::comm_cases()) one.run(*rest);
  rest->barrier();
  std::printf("done %d %d\n", world->rank(), rest->size());
  std::fflush(stdout);
  return 0;
}

}  // namespace
}  // namespace treeattn

// fault_mpi_test DEADLINE ELEMENTS
int main(int argc, char** argv) {
  try {
    if (argc != 3) throw std::runtime_error("usage: fault_mpi_test DEADLINE ELEMENTS");
    return treeattn::run(treeattn::Seconds(std::stod(argv[1])), std::stoul(argv[2]));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
