// SPDX-License-Identifier: Apache-2.0
// Throwing InvalidArgument with a formatted message.
#pragma once

#include <fmt/core.h>

#include <cstdint>
#include <span>
#include <string_view>
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

// The memory of a caller's span, which may be anywhere if the span is empty.
template <typename T>
void require_address(std::string_view name, std::span<T> values) {
  const void* address = values.data();
  require(values.empty() || (address != nullptr && reinterpret_cast<std::uintptr_t>(address) % alignof(T) == 0),
          "{} = {} with {} values; accepted: an address that is a multiple of {}", name, address, values.size(),
          alignof(T));
}

// Spans of which one is written while the other is in use.
template <typename T>
void require_apart(std::string_view name, std::span<const T> values, std::string_view other_name,
                   std::span<const T> others) {
  const auto begin = [](std::span<const T> span) { return reinterpret_cast<std::uintptr_t>(span.data()); };
  const auto end = [&](std::span<const T> span) { return begin(span) + span.size_bytes(); };
  require(values.empty() || others.empty() || end(values) <= begin(others) || end(others) <= begin(values),
          "{} and {} overlap; accepted: memory of its own for each", name, other_name);
}

}  // namespace treeattn::base
