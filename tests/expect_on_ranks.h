// SPDX-License-Identifier: Apache-2.0
// Runs a check on ranks that are threads.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "parallel_checks.h"

namespace treeattn::testing_parallel {

// Reports what any of them found.
inline void expect_on_ranks(int ranks, const std::function<Failures(const std::shared_ptr<Communicator>&)>& check,
                            RankOptions options = {}) {
  std::mutex mutex;
  Failures all;
  run_ranks(
      ranks,
      [&](std::shared_ptr<Communicator> world) {
        const Failures failures = check(world);
        const std::scoped_lock lock(mutex);
        for (const std::string& failure : failures) {
          all.push_back("rank " + std::to_string(world->rank()) + ": " + failure);
        }
      },
      options);
  for (const std::string& failure : all) ADD_FAILURE() << failure;
}

}  // namespace treeattn::testing_parallel
