// SPDX-License-Identifier: Apache-2.0
// How fast this machine multiplies and adds: the limit that prefill attention is held against.
#pragma once

#include <functional>

#include "treeattn/thread_pool.h"

namespace treeattn::base {

// 1e9 operations a second.
struct BurstRate {
  double best = 0;
  double median = 0;
  double least = 0;
};

// So many threads of the pool run `burst` at once for about `seconds`: a processor may hold a higher rate for some
// milliseconds than for a second, so the limit of a call is what it holds for as long as the call takes.
// burst(iterations) does that many rounds of independent instructions in registers and returns the operations it did.
// It must be callable from several threads at once. Requires 1 <= threads <= pool.size().
BurstRate burst_rate(ThreadPool& pool, int threads, const std::function<double(long iterations)>& burst, double seconds,
                     int repeats);

// The best rate of all threads in GFLOP/s: a multiply-add counts as two operations.
double fma_peak_gflops(ThreadPool& pool, const std::function<double(long iterations)>& burst, double seconds,
                       int repeats = 3);

}  // namespace treeattn::base
