// SPDX-License-Identifier: Apache-2.0
// Finds out how many iterations take the time asked for, then takes the best of a few bursts.
#include "base/fma_peak.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <vector>

namespace treeattn::base {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

double fma_peak_gflops(ThreadPool& pool, const std::function<double(long iterations)>& burst, double seconds,
                       int repeats) {
  constexpr double kLeastSeconds = 0.02;  // a thousand times a wake-up
  constexpr long kMostIterations = 1L << 40;
  long iterations = 1024;
  for (; iterations < kMostIterations; iterations *= 2) {
    const auto start = std::chrono::steady_clock::now();
    burst(iterations);
    const double took = seconds_since(start);
    if (took < kLeastSeconds) continue;
    iterations = static_cast<long>(static_cast<double>(iterations) * std::max(1.0, seconds / took));
    break;
  }

  const auto threads = static_cast<std::size_t>(pool.size());
  std::vector<double> done(threads);
  double best = 0;
  for (int repeat = 0; repeat < std::max(repeats, 1); ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    pool.run(threads, [&](std::size_t task, int) { done[task] = burst(iterations); });
    const double took = seconds_since(start);
    double operations = 0;
    for (const double part : done) operations += part;
    best = std::max(best, operations / took * 1e-9);
  }
  return best;
}

}  // namespace treeattn::base
