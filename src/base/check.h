// SPDX-License-Identifier: Apache-2.0
// Throwing InvalidArgument with a formatted message.
#pragma once

#include <fmt/core.h>

#include <utility>

#include "treeattn/error.h"

namespace treeattn::base {

// throw_invalid("heads = {}; accepted: 1 or more", heads);
template <typename... Args>
[[noreturn]] void throw_invalid(fmt::format_string<Args...> format, Args&&... args) {
  throw InvalidArgument(fmt::format(format, std::forward<Args>(args)...));
}

// The same unless `condition` holds. The arguments are evaluated either way, so keep them cheap.
template <typename... Args>
void require(bool condition, fmt::format_string<Args...> format, Args&&... args) {
  if (!condition) [[unlikely]]
    throw_invalid(format, std::forward<Args>(args)...);
}

}  // namespace treeattn::base
