// SPDX-License-Identifier: Apache-2.0
// The checks of parallel_checks.h over MPI. Every rank runs them; the exit status is not 0 on a rank that found
// something wrong.
#include <cstdio>
#include <exception>

#include "parallel_checks.h"
#include "prefill_checks.h"

namespace {

using namespace treeattn;
using testing_parallel::Failures;

Failures check_all(const std::shared_ptr<Communicator>& world) {
  Failures all;
  const auto add = [&](const Failures& failures) { all.insert(all.end(), failures.begin(), failures.end()); };
  const std::vector<double> weights = testing_parallel::uneven_weights(world->size());
  // Every rank works out for itself what one machine would say, and there are more ranks than cores.
  const bool few = world->size() <= 4;
  add(testing_parallel::check_strategies(world, testing_parallel::prepared_cases(few ? 7 : 31)));
  add(testing_parallel::check_strategies(world, testing_parallel::prepared_cases(few ? 23 : 53, 2), weights));
  add(testing_parallel::check_bytes(world));
  add(testing_parallel::check_bytes(world, weights));
  for (kernels::Case shape : testing_parallel::prefill_cases()) {
    if (!few) shape.queries = 150;
    const testing_parallel::PreparedPrefill prefill(shape);
    add(testing_parallel::check_prefill(world, prefill));
    add(testing_parallel::check_prefill(world, prefill, weights));
  }
  return all;
}

}  // namespace

int main() {
  try {
    const auto world = mpi_communicator();
    const Failures failures = check_all(world);
    for (const std::string& failure : failures) std::printf("rank %d: %s\n", world->rank(), failure.c_str());
    return failures.empty() ? 0 : 1;
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
}
