// SPDX-License-Identifier: Apache-2.0
// A cluster as SimGrid sees it: one host for each device, links inside the nodes and between them.
#pragma once

#include <functional>
#include <simgrid/s4u.hpp>
#include <vector>

#include "plan/cluster.h"

namespace treeattn::tools {

// Times come from the cluster's numbers alone: no factors for protocols, and nothing for the program's own running
// time. To be called before anything else of SimGrid, the engine apart.
void configure_simulator();

// The host of each rank; its speed is the bytes per second that attention reads. Nodes are filled one after the other;
// on_node: called after each.
std::vector<simgrid::s4u::Host*> make_platform(const plan::Cluster& cluster, int ranks, int ranks_per_node,
                                               const std::function<void()>& on_node);

}  // namespace treeattn::tools
