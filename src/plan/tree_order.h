// SPDX-License-Identifier: Apache-2.0
// The canonical order of the reduction as index maths: which leaf of the tree a chunk belongs to, and the chunks of a
// leaf.
//
// The sequence is cut into chunks by global position, and the tree is the complete binary tree over the branches. With
// cyclic placement chunk c belongs to branch c mod branches, and the leaves are in bit-reversed branch order:
//
//   branches = 8            leaf    0   1   2   3   4   5   6   7
//                           branch  0   4   2   6   1   5   3   7
//                                    \ /     \ /     \ /     \ /
//                                     \_______/       \_______/
//                                         \_______________/
//
// so a contiguous range of leaves is a set of branches spread evenly over the sequence. With contiguous placement leaf
// and branch are the same number, and a contiguous range of leaves is one piece of the sequence.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include "treeattn/order.h"

namespace treeattn::plan {

inline constexpr std::int64_t kNoChunk = std::numeric_limits<std::int64_t>::max();

// log2 of a power of two.
constexpr int log2_exact(int power_of_two) {
  int bits = 0;
  while ((1 << bits) < power_of_two) ++bits;
  return bits;
}

// The number with the bits of `index` below `size`, a power of two, in reverse. Its own inverse.
constexpr int reverse_bits(int index, int size) {
  int reversed = 0;
  for (int bit = 1, mirror = size >> 1; bit < size; bit <<= 1, mirror >>= 1) {
    if (index & bit) reversed |= mirror;
  }
  return reversed;
}

// Branches for so many ranks: as usual, or more, so that there is a leaf for each.
constexpr int branches_for(int ranks) {
  return std::max(ReductionOrder().branches, static_cast<int>(std::bit_ceil(static_cast<unsigned>(ranks))));
}

// Throws InvalidArgument, naming the value and what is accepted.
void check_order(const ReductionOrder& order);

constexpr std::int64_t chunk_of(const ReductionOrder& order, std::int64_t position) {
  return position / order.chunk_tokens;
}

// Chunks of a sequence of so many tokens, the last one perhaps not full, and tokens of one of them.
constexpr std::int64_t chunk_count(const ReductionOrder& order, std::int64_t tokens) {
  return tokens / order.chunk_tokens + (tokens % order.chunk_tokens != 0 ? 1 : 0);
}
constexpr std::int64_t tokens_in_chunk(const ReductionOrder& order, std::int64_t tokens, std::int64_t chunk) {
  return std::min(order.chunk_tokens, tokens - chunk * order.chunk_tokens);
}

// The branch at a leaf of the tree. Its own inverse.
constexpr int branch_of_leaf(const ReductionOrder& order, int leaf) {
  return order.placement == Placement::kCyclic ? reverse_bits(leaf, order.branches) : leaf;
}

constexpr int leaf_of_chunk(const ReductionOrder& order, std::int64_t chunk) {
  if (order.placement == Placement::kCyclic) {
    return reverse_bits(static_cast<int>(chunk % order.branches), order.branches);
  }
  return static_cast<int>(
      std::min<std::int64_t>(chunk / (order.branch_tokens / order.chunk_tokens), order.branches - 1));
}

// The first chunk of `leaf` that is `from` or later; kNoChunk when there is none.
constexpr std::int64_t first_chunk(const ReductionOrder& order, int leaf, std::int64_t from) {
  if (order.placement == Placement::kCyclic) {
    const int branch = branch_of_leaf(order, leaf);
    return from + (branch - from % order.branches + order.branches) % order.branches;
  }
  const std::int64_t begin = leaf * (order.branch_tokens / order.chunk_tokens);
  const std::int64_t chunk = std::max(from, begin);
  return leaf_of_chunk(order, chunk) == leaf ? chunk : kNoChunk;
}

// The chunk of the same leaf after `chunk`; kNoChunk when there is none.
constexpr std::int64_t next_chunk(const ReductionOrder& order, int leaf, std::int64_t chunk) {
  if (order.placement == Placement::kCyclic) return chunk + order.branches;
  return leaf_of_chunk(order, chunk + 1) == leaf ? chunk + 1 : kNoChunk;
}

// How many chunks of `leaf` there are from `first` to `last`, both included.
constexpr std::int64_t chunks_of_leaf(const ReductionOrder& order, int leaf, std::int64_t first, std::int64_t last) {
  const std::int64_t begin = first_chunk(order, leaf, first);
  if (begin == kNoChunk || begin > last) return 0;
  if (order.placement == Placement::kCyclic) return (last - begin) / order.branches + 1;
  if (leaf == order.branches - 1) return last - begin + 1;
  return std::min(last + 1, (leaf + 1) * (order.branch_tokens / order.chunk_tokens)) - begin;
}

}  // namespace treeattn::plan
