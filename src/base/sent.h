// SPDX-License-Identifier: Apache-2.0
// Throwing Error for what another rank has sent: it may be of another build, or somebody who poses as a rank.
#pragma once

#include <fmt/core.h>

#include <string>
#include <utility>

#include "treeattn/error.h"

namespace treeattn::base {

// require_sent(length >= 0, rank, "a length of {}; accepted: 0 or more", length);
// The arguments are evaluated either way, so keep them cheap.
template <typename... Args>
void require_sent(bool condition, int rank, fmt::format_string<Args...> format, Args&&... args) {
  if (!condition) [[unlikely]] {
    throw Error(fmt::format("rank {} sent {}", rank, fmt::format(format, std::forward<Args>(args)...)));
  }
}

}  // namespace treeattn::base
