// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "comm/topology.h"

namespace treeattn::comm {

std::vector<int> order_by_neighbourhood(std::vector<int> processors) {
  std::sort(processors.begin(), processors.end());
  return processors;
}

int numa_node_of(int) { return 0; }

}  // namespace treeattn::comm
