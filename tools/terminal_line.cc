// SPDX-License-Identifier: Apache-2.0
#include "terminal_line.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "notes.h"

namespace treeattn::tools {

bool can_redraw_line() {
  const char* kind = std::getenv("TERM");
  return ::isatty(STDERR_FILENO) != 0 && !(kind != nullptr && std::string_view(kind) == "dumb");
}

void redraw_line(std::string_view text) {
  winsize size{};  // the columns stay 0 where nobody knows them
  if (::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) text = text.substr(0, size.ws_col - 1u);
  print_note("\r\033[K{}", text);
  std::fflush(stderr);
}

}  // namespace treeattn::tools
