// SPDX-License-Identifier: Apache-2.0
#include "rate_progress.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "table.h"
#include "terminal_line.h"

namespace treeattn::tools {

RateProgress::RateProgress(std::string label, std::string unit)
    : label_(std::move(label)),
      unit_(std::move(unit)),
      terminal_(can_redraw_line()),
      start_(Clock::now()),
      last_(start_) {}

RateProgress::~RateProgress() { clear(); }

void RateProgress::update(std::int64_t done, std::int64_t total) {
  using namespace std::chrono_literals;
  const auto now = Clock::now();
  if (!terminal_ || now - start_ < 2s || now - last_ < 100ms) return;
  last_ = now;
  drawn_ = true;
  const double seconds = std::chrono::duration<double>(now - start_).count();
  const double rate = static_cast<double>(done) / seconds;
  const double left = rate > 0 ? static_cast<double>(total - done) / rate : 0;
  const auto whole = static_cast<std::int64_t>(std::min(left, 359999.0));
  redraw_line(fmt::format("{} {:3}%  {}/{} {}  {}/s  {}:{:02} left", label_, total > 0 ? 100 * done / total : 100, done,
                          total, unit_, format_number(rate), whole / 60, whole % 60));
}

void RateProgress::clear() {
  if (!drawn_) return;
  redraw_line("");
  drawn_ = false;
}

}  // namespace treeattn::tools
