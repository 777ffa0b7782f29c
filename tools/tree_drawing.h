// SPDX-License-Identifier: Apache-2.0
// Who sends to whom, drawn from the schedules that are executed: the reduction tree with its ranks and nodes, and
// beside it the ring. Lines (ta-line) are messages, marks (ta-mark) are ranks.
#pragma once

#include <span>
#include <string>

#include "treeattn/strategy.h"

namespace treeattn::tools {

// The way up of a schedule: kMerge, kTwoLevel. node_of_rank: [ranks].
std::string draw_tree(const std::string& id, const std::string& title, Strategy strategy,
                      std::span<const int> node_of_rank);
// One step of the ring; ranks - 1 of them make a decoding step.
std::string draw_ring(const std::string& id, const std::string& title, std::span<const int> node_of_rank);

}  // namespace treeattn::tools
