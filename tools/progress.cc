// SPDX-License-Identifier: Apache-2.0
#include "progress.h"

#include <fmt/format.h>

namespace treeattn::tools {

void Progress::at(std::size_t done, const std::string& what) {
  done_ = done;
  if (line_.due()) line_.draw(fmt::format("{} {}/{}  {:.60}", label_, done_, total_, what));
}

}  // namespace treeattn::tools
