// SPDX-License-Identifier: Apache-2.0
// Waiting for another thread without sleeping. To wake a thread takes 4 us on an idle machine, and 100 to 200 on a
// virtual one of 16 cores, whose core has gone to sleep as well.
#pragma once

#include <chrono>

#include "base/relax.h"

namespace treeattn::base {

// Longer than what one thread does between two runs of a token, and no more than what nobody misses after the last.
inline constexpr std::chrono::microseconds kSpin{2000};

// Spins until done() or until kSpin has passed. Returns done().
template <class Done>
bool spin_until(const Done& done) {
  const auto start = std::chrono::steady_clock::now();
  do {
    for (int i = 0; i < 64; ++i) {
      if (done()) return true;
      relax();
    }
  } while (std::chrono::steady_clock::now() - start < kSpin);
  return done();
}

}  // namespace treeattn::base
