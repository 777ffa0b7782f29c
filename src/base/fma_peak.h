// SPDX-License-Identifier: Apache-2.0
// How fast this machine multiplies and adds: the limit that prefill attention is held against.
#pragma once

#include <functional>

#include "treeattn/thread_pool.h"

namespace treeattn::base {

// Best rate, in 1e9 floating-point operations a second, of all threads of the pool running `burst` at once for about
// `seconds`: a processor may hold a higher rate for some milliseconds than for a second, so the limit of a call is what
// it holds for as long as the call takes.
// burst(iterations) does that many rounds of independent multiply-adds in registers and returns the operations it did
// (a multiply-add counts as two). It must be callable from several threads at once.
double fma_peak_gflops(ThreadPool& pool, const std::function<double(long iterations)>& burst, double seconds,
                       int repeats = 3);

}  // namespace treeattn::base
