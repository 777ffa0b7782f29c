// SPDX-License-Identifier: Apache-2.0
// A progress line: how many steps of how many, and which (terminal_line.h says when it is shown).
#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include "terminal_line.h"

namespace treeattn::tools {

// Not thread-safe: step() from one thread.
class Progress {
 public:
  // total: how many steps there will be.
  Progress(std::string label, std::size_t total) : label_(std::move(label)), total_(total) {}

  // Another step begins or has been done; `what` names it.
  void step(const std::string& what) { at(done_ + 1, what); }
  // So many steps have been done, and `what` says more.
  void at(std::size_t done, const std::string& what);
  // Wipes the line, so that something else can be printed; the next step() draws it again.
  void clear() { line_.clear(); }

 private:
  std::string label_;
  std::size_t total_;
  std::size_t done_ = 0;
  TerminalLine line_;
};

}  // namespace treeattn::tools
