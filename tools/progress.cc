// SPDX-License-Identifier: Apache-2.0
// One line, rewritten in place at most ten times a second.
#include "progress.h"

#include <fmt/format.h>

#include <utility>

#include "terminal_line.h"

namespace treeattn::tools {

Progress::Progress(std::string label, std::size_t total)
    : label_(std::move(label)),
      total_(total),
      terminal_(can_redraw_line()),
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
  redraw_line(fmt::format("{} {}/{}  {:.60}", label_, done_, total_, what));
}

void Progress::clear() {
  if (!drawn_) return;
  redraw_line("");
  drawn_ = false;
}

}  // namespace treeattn::tools
