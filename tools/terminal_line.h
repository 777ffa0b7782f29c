// SPDX-License-Identifier: Apache-2.0
// The one line of a terminal that progress is shown on, by way of stderr.
#pragma once

#include <string_view>

namespace treeattn::tools {

// Whether stderr is a terminal that can wipe a line.
bool can_redraw_line();

// Wipes the line and writes this, no more than fits: what has gone on to a second line cannot be wiped.
void redraw_line(std::string_view text);

}  // namespace treeattn::tools
