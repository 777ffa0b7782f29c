// SPDX-License-Identifier: Apache-2.0
// The canonical order of the reduction: which keys belong to which branch, and where a branch hangs in the tree.
//
// The sequence is cut into chunks by global position; chunk c belongs to branch c mod branches. The tree is the
// complete binary tree over the branches, its leaves in bit-reversed branch order:
//
//   branches = 8            leaf    0   1   2   3   4   5   6   7
//                           branch  0   4   2   6   1   5   3   7
//                                    \ /     \ /     \ /     \ /
//                                     \_______/       \_______/
//                                         \_______________/
//
// so a contiguous range of leaves is a set of branches spread evenly over the sequence.
#pragma once

#include <cstdint>

namespace treeattn::plan {

struct TreeOrder {
  std::int64_t chunk_tokens = 256;  // > 0
  int branches = 64;                // a power of two

  std::int64_t chunk_of(std::int64_t position) const { return position / chunk_tokens; }
  int branch_of_chunk(std::int64_t chunk) const { return static_cast<int>(chunk % branches); }
};

// The first chunk of `branch` that does not end before `position`.
constexpr std::int64_t first_chunk_of(const TreeOrder& order, int branch, std::int64_t position) {
  const std::int64_t chunk = position / order.chunk_tokens;
  return chunk + (branch - chunk % order.branches + order.branches) % order.branches;
}

// log2 of a power of two.
constexpr int log2_exact(int power_of_two) {
  int bits = 0;
  while ((1 << bits) < power_of_two) ++bits;
  return bits;
}

// The branch at a leaf of the tree. Its own inverse: leaf_of_branch is the same function.
constexpr int branch_of_leaf(int leaf, int branches) {
  int reversed = 0;
  for (int bit = 1, mirror = branches >> 1; bit < branches; bit <<= 1, mirror >>= 1) {
    if (leaf & bit) reversed |= mirror;
  }
  return reversed;
}

}  // namespace treeattn::plan
