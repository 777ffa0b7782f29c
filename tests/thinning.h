// SPDX-License-Identifier: Apache-2.0
// Fewer cases where a test would take too long.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>

namespace treeattn {

// Under an emulator or a sanitizer everything takes ten times as long: TREEATTN_TEST_THINNING=4 takes a quarter of the
// random cases, and every fourth of a list where a full run takes all. Said out loud.
inline std::size_t thinning() {
  static const std::size_t factor = [] {
    const char* given = std::getenv("TREEATTN_TEST_THINNING");
    const int chosen = given != nullptr ? std::max(1, std::atoi(given)) : 1;
    if (chosen > 1) std::printf("TREEATTN_TEST_THINNING=%d: fewer cases than in a full run\n", chosen);
    return static_cast<std::size_t>(chosen);
  }();
  return factor;
}

}  // namespace treeattn
