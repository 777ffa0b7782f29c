// SPDX-License-Identifier: Apache-2.0
// A progress line with a rate and the time left (terminal_line.h says when it is shown).
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "terminal_line.h"

namespace treeattn::tools {

// Not thread-safe: update() from one thread.
class RateProgress {
 public:
  RateProgress(std::string label, std::string unit) : label_(std::move(label)), unit_(std::move(unit)) {}

  void update(std::int64_t done, std::int64_t total);
  void clear() { line_.clear(); }

 private:
  std::string label_, unit_;
  TerminalLine line_;
};

}  // namespace treeattn::tools
