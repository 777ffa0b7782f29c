// SPDX-License-Identifier: Apache-2.0
// Finds out how many iterations take the time asked for, then takes the best of a few bursts.
#include "base/fma_peak.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "base/timing.h"

namespace treeattn::base {

BurstRate burst_rate(ThreadPool& pool, int threads, const std::function<double(long iterations)>& burst, double seconds,
                     int repeats) {
  constexpr double kLeastSeconds = 0.02;  // a thousand times a wake-up
  constexpr long kMostIterations = 1L << 40;
  long iterations = 1024;
  for (; iterations < kMostIterations; iterations *= 2) {
    const auto start = Clock::now();
    burst(iterations);
    const double took = seconds_since(start);
    if (took < kLeastSeconds) continue;
    iterations = static_cast<long>(static_cast<double>(iterations) * std::max(1.0, seconds / took));
    break;
  }

  const auto tasks = static_cast<std::size_t>(threads);
  std::vector<double> done(tasks), rates;
  for (int repeat = 0; repeat < std::max(repeats, 1); ++repeat) {
    const auto start = Clock::now();
    pool.run(tasks, [&](std::size_t task, int) { done[task] = burst(iterations); });
    const double took = seconds_since(start);
    double operations = 0;
    for (const double part : done) operations += part;
    rates.push_back(operations / took * 1e-9);
  }
  std::sort(rates.begin(), rates.end());
  return {rates.back(), rates[rates.size() / 2], rates.front()};
}

double fma_peak_gflops(ThreadPool& pool, const std::function<double(long iterations)>& burst, double seconds,
                       int repeats) {
  return burst_rate(pool, pool.size(), burst, seconds, repeats).best;
}

}  // namespace treeattn::base
