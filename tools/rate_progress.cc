// SPDX-License-Identifier: Apache-2.0
#include "rate_progress.h"

#include <fmt/format.h>

#include <algorithm>

#include "table.h"

namespace treeattn::tools {

void RateProgress::update(std::int64_t done, std::int64_t total) {
  if (!line_.due()) return;
  const double rate = static_cast<double>(done) / line_.seconds();
  const double left = rate > 0 ? static_cast<double>(total - done) / rate : 0;
  const auto whole = static_cast<std::int64_t>(std::min(left, 359999.0));
  line_.draw(fmt::format("{} {:3}%  {}/{} {}  {}/s  {}:{:02} left", label_, total > 0 ? 100 * done / total : 100, done,
                         total, unit_, format_number(rate), whole / 60, whole % 60));
}

}  // namespace treeattn::tools
