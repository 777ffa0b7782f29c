// SPDX-License-Identifier: Apache-2.0
#include "terminal_line.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "notes.h"

namespace treeattn::tools {
namespace {

bool can_redraw_line() {
  const char* kind = std::getenv("TERM");
  return ::isatty(STDERR_FILENO) != 0 && !(kind != nullptr && std::string_view(kind) == "dumb");
}

}  // namespace

TerminalLine::TerminalLine() : terminal_(can_redraw_line()) {}

bool TerminalLine::due() {
  using namespace std::chrono_literals;
  if (!terminal_) return false;
  const auto now = base::Clock::now();
  if (now - start_ < 2s || now - last_ < 100ms) return false;
  last_ = now;
  return true;
}

void TerminalLine::draw(std::string_view text) {
  winsize size{};  // the columns stay 0 where nobody knows them
  if (::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) text = text.substr(0, size.ws_col - 1u);
  print_note("\r\033[K{}", text);
  std::fflush(stderr);
  drawn_ = true;
}

void TerminalLine::clear() {
  if (!drawn_) return;
  draw("");
  drawn_ = false;
}

}  // namespace treeattn::tools
