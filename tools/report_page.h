// SPDX-License-Identifier: Apache-2.0
// One page of HTML with everything in it: no other file, no network, light and dark, printable.
#pragma once

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "outcome.h"

namespace treeattn::tools {

// A drawing by its id: <svg>...</svg>.
using Drawing = std::pair<std::string, std::string>;

// The reduction tree and the ring over 16 ranks on two nodes.
std::vector<Drawing> topology_drawings();
// All figures of an outcome, in their order.
std::vector<Drawing> figure_drawings(const Outcome& outcome);

std::string report_page(std::span<const Outcome> outcomes);

}  // namespace treeattn::tools
