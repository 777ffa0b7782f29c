// SPDX-License-Identifier: Apache-2.0
// The chunks below a node of the canonical tree, without going through its leaves: they are evenly spaced.
#pragma once

#include <cstdint>

#include "base/round_up.h"
#include "plan/node_set.h"
#include "plan/tree_order.h"

namespace treeattn::plan {

struct NodeChunks {
  std::int64_t first = 0;
  std::int64_t step = 1;
  std::int64_t last = kNoChunk;  // none beyond it

  // The first one that is `chunk` or later; kNoChunk when there is none.
  std::int64_t from(std::int64_t chunk) const {
    const std::int64_t next = chunk <= first ? first : first + base::round_up(chunk - first, step);
    return next <= last ? next : kNoChunk;
  }
};

// Cyclic placement: the leaves of a node have the upper bits of their numbers in common, so their branches the lower
// ones.
inline NodeChunks chunks_of_node(const ReductionOrder& order, const TreeNode& node) {
  if (order.placement == Placement::kCyclic) {
    return {branch_of_leaf(order, node.first_leaf()), order.branches >> node.level, kNoChunk};
  }
  const std::int64_t leaf_chunks = order.branch_tokens / order.chunk_tokens;
  const bool open = node.last_leaf() == order.branches;  // the last leaf has all that follows
  return {node.first_leaf() * leaf_chunks, 1, open ? kNoChunk : node.last_leaf() * leaf_chunks - 1};
}

}  // namespace treeattn::plan
