// SPDX-License-Identifier: Apache-2.0
// What the command says beside its output: complaints, notes and progress, on stderr.
#pragma once

#include <fmt/format.h>

#include <cstdio>
#include <string>
#include <utility>

namespace treeattn::tools {

// Where stderr cannot be written nobody listens. That must not end the work, as the exception of fmt::print would.
template <class... Arguments>
void print_note(fmt::format_string<Arguments...> format, Arguments&&... arguments) {
  const std::string text = fmt::format(format, std::forward<Arguments>(arguments)...);
  std::fwrite(text.data(), 1, text.size(), stderr);
}

}  // namespace treeattn::tools
