// SPDX-License-Identifier: Apache-2.0
// Which node a rank is on, and which cores a rank that is a thread gets.
#pragma once

#include <string_view>
#include <vector>

namespace treeattn::comm {

// The nodes renamed 0, 1, ... in the order of their lowest ranks.
std::vector<int> number_nodes(const std::vector<int>& nodes);

// "0,0,1,1" -> {0, 0, 1, 1}: whole numbers of at least 0, one for each rank. Throws InvalidArgument.
std::vector<int> parse_nodes(std::string_view text, int ranks);

// The nodes that the caller has asked for, else those of TREEATTN_NODES, else `found`; numbered as above. Throws
// InvalidArgument if there is not one for each rank.
std::vector<int> choose_nodes(const std::vector<int>& asked, const std::vector<int>& found);

// Cuts the processors into one piece for each rank, neighbours together; with more ranks than processors, several
// consecutive ranks get the same one. Requires at least one processor.
std::vector<std::vector<int>> cut_processors(const std::vector<int>& processors, int ranks);

// By hwloc, or by numbers alone in a build without it.

// The processors with those that share more (a core, a cache, a NUMA node) next to each other.
std::vector<int> order_by_neighbourhood(std::vector<int> processors);
// The NUMA node of a processor, 0 where it is not known.
int numa_node_of(int processor);

}  // namespace treeattn::comm
