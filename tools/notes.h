// SPDX-License-Identifier: Apache-2.0
// What the command says: a text as it grows, on stdout, and beside it complaints, notes and progress, on stderr.
#pragma once

#include <fmt/format.h>

#include <cstdio>
#include <string>
#include <string_view>
#include <utility>

namespace treeattn::tools {

// At once. Goes on where it cannot: the text may still be saved, and main() looks whether all was printed.
inline void print_text(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

// Where stderr cannot be written nobody listens. That must not end the work, as the exception of fmt::print would.
template <class... Arguments>
void print_note(fmt::format_string<Arguments...> format, Arguments&&... arguments) {
  const std::string text = fmt::format(format, std::forward<Arguments>(arguments)...);
  std::fwrite(text.data(), 1, text.size(), stderr);
}

}  // namespace treeattn::tools
