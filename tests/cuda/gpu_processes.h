// SPDX-License-Identifier: Apache-2.0
// Tests of ranks that are processes on one GPU. The process of the test itself never touches CUDA: what it forks could
// not use it any more.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>

#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "tcp_ranks.h"
#include "treeattn/cuda.h"

namespace treeattn::testing_gpu {

inline constexpr int kSkipped = 77;

// In a process that was forked, where gtest does not see what fails.
inline void require(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

class Processes : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    std::fflush(nullptr);
    const pid_t child = ::fork();
    if (child == 0) {
      const std::string problem = cuda_problem();
      if (!problem.empty()) std::printf("%s\n", problem.c_str());
      std::fflush(nullptr);
      ::_exit(problem.empty() ? 0 : kSkipped);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    if (WEXITSTATUS(status) == kSkipped) GTEST_SKIP() << "*** SKIPPED: no GPU, see above ***";
  }
};

// How the processes end where the last one is killed.
inline std::vector<int> all_but_the_last_return(int ranks) {
  std::vector<int> statuses(static_cast<std::size_t>(ranks), 0);
  statuses.back() = 128 + SIGKILL;
  return statuses;
}

}  // namespace treeattn::testing_gpu
