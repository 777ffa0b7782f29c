// SPDX-License-Identifier: Apache-2.0
#include "terminal_line.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>

#include "notes.h"

namespace treeattn::tools {
namespace {

bool can_redraw_line() {
  const char* kind = std::getenv("TERM");
  return ::isatty(STDERR_FILENO) != 0 && !(kind != nullptr && std::string_view(kind) == "dumb");
}

constexpr std::string_view kWipe = "\r\033[K";

// What a handler has to know, in whichever thread it runs.
std::atomic<bool> line_is_shown = false;
static_assert(std::atomic<bool>::is_always_lock_free);

void wipe_and_end(int signal) {
  if (line_is_shown && ::write(STDERR_FILENO, kWipe.data(), kWipe.size()) < 0) {
    // Nobody listens.
  }
  ::raise(signal);  // it is the system's again, and comes when this returns
}

// Those that end a command from outside, unless somebody has other plans with them.
void wipe_on_signals() {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) {
    struct sigaction now {};
    if (::sigaction(signal, nullptr, &now) == 0 && now.sa_handler == SIG_DFL) end_wiped_on(signal);
  }
}

}  // namespace

void end_wiped_on(int signal) {
  struct sigaction action {};
  action.sa_handler = wipe_and_end;
  action.sa_flags = SA_RESETHAND;
  ::sigaction(signal, &action, nullptr);
}

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
  if (!drawn_) wipe_on_signals();
  drawn_ = line_is_shown = true;
  print_note("{}{}", kWipe, text);
  std::fflush(stderr);
}

void TerminalLine::clear() {
  if (!drawn_) return;
  draw("");
  drawn_ = line_is_shown = false;
}

}  // namespace treeattn::tools
