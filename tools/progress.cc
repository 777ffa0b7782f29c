// SPDX-License-Identifier: Apache-2.0
// One line, rewritten in place at most ten times a second.
#include "progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <utility>

#include "notes.h"

namespace treeattn::tools {

Progress::Progress(std::string label, std::size_t total)
    : label_(std::move(label)),
      total_(total),
      terminal_(::isatty(STDERR_FILENO) != 0),
      start_(std::chrono::steady_clock::now()),
      last_(start_) {}

Progress::~Progress() { clear(); }

void Progress::step(const std::string& what) { at(done_ + 1, what); }

void Progress::at(std::size_t done, const std::string& what) {
  using namespace std::chrono_literals;
  done_ = done;
  if (!terminal_) return;
  const auto now = std::chrono::steady_clock::now();
  if (now - start_ < 2s || now - last_ < 100ms) return;
  last_ = now;
  drawn_ = true;
  print_note("\r\033[K{} {}/{}  {:.60}", label_, done_, total_, what);
  std::fflush(stderr);
}

void Progress::clear() {
  if (!drawn_) return;
  print_note("\r\033[K");
  std::fflush(stderr);
  drawn_ = false;
}

}  // namespace treeattn::tools
