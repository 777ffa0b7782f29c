// SPDX-License-Identifier: Apache-2.0
#include <hwloc.h>

#include <algorithm>
#include <map>
#include <utility>

#include "comm/topology.h"

namespace treeattn::comm {
namespace {

struct Place {
  unsigned order = 0;  // hwloc's logical number: what lies together is numbered together
  int numa_node = 0;
};

std::map<int, Place> read_places() {
  std::map<int, Place> places;
  hwloc_topology_t topology;
  if (hwloc_topology_init(&topology) != 0) return places;
  if (hwloc_topology_load(topology) == 0) {
    for (hwloc_obj_t unit = nullptr; (unit = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_PU, unit)) != nullptr;) {
      places[static_cast<int>(unit->os_index)].order = unit->logical_index;
    }
    for (hwloc_obj_t node = nullptr;
         (node = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_NUMANODE, node)) != nullptr;) {
      for (auto& [processor, place] : places) {
        if (hwloc_bitmap_isset(node->cpuset, static_cast<unsigned>(processor)) != 0) {
          place.numa_node = static_cast<int>(node->logical_index);
        }
      }
    }
  }
  hwloc_topology_destroy(topology);
  return places;
}

// Read once: it takes milliseconds and does not change.
const std::map<int, Place>& places() {
  static const std::map<int, Place> kPlaces = read_places();
  return kPlaces;
}

Place place_of(int processor) {
  const auto found = places().find(processor);
  return found == places().end() ? Place{} : found->second;
}

}  // namespace

std::vector<int> order_by_neighbourhood(std::vector<int> processors) {
  std::sort(processors.begin(), processors.end(),
            [](int a, int b) { return std::pair(place_of(a).order, a) < std::pair(place_of(b).order, b); });
  return processors;
}

int numa_node_of(int processor) { return place_of(processor).numa_node; }

}  // namespace treeattn::comm
