// SPDX-License-Identifier: Apache-2.0
// The one line of a terminal that progress is shown on, by way of stderr.
#pragma once

#include <string_view>

#include "base/timing.h"

namespace treeattn::tools {

// The signal ends the process as the system does it, but a progress line is wiped before. Safe in a handler.
void end_wiped_on(int signal);

// For people who wait: only on a terminal that can wipe a line, only once the work has lasted two seconds, and redrawn
// at most ten times a second. A signal that ends the process wipes it. Not thread-safe.
class TerminalLine {
 public:
  TerminalLine();
  // Wipes it.
  ~TerminalLine() { clear(); }
  TerminalLine(const TerminalLine&) = delete;
  TerminalLine& operator=(const TerminalLine&) = delete;

  // Whether there is a terminal to draw it on.
  bool on_terminal() const { return terminal_; }
  // Whether it is time to draw it again.
  bool due();
  // Instead of what is there, no more than fits: what has gone on to a second line cannot be wiped.
  void draw(std::string_view text);
  // Wipes the line, so that something else can be printed.
  void clear();
  // Since the work began.
  double seconds() const { return base::seconds_since(start_); }

 private:
  bool terminal_;
  bool drawn_ = false;
  base::Clock::time_point start_ = base::Clock::now();
  base::Clock::time_point last_ = start_;
};

}  // namespace treeattn::tools
