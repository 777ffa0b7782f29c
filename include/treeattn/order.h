// SPDX-License-Identifier: Apache-2.0
// The canonical order of the reduction. Same keys, same order: the same bits, on any number of threads, ranks and
// machines.
#pragma once

#include <cstdint>

namespace treeattn {

// Which branch a chunk of the sequence belongs to.
enum class Placement : std::uint8_t {
  kCyclic,      // chunk c belongs to branch c mod branches: new tokens go round, no rank grows alone
  kContiguous,  // a branch is one piece of the sequence, as in the paper
};

// The sequence is cut into chunks by global position; a chunk belongs to a branch; the branches are the leaves of a
// complete binary tree, and states are merged along that tree. A rank carries some of the branches.
struct ReductionOrder {
  std::int64_t chunk_tokens = 256;  // a multiple of 64, 64 to 2^40
  int branches = 256;               // a power of two, 1 to 65536
  Placement placement = Placement::kCyclic;
  // kContiguous only: tokens of a branch, a multiple of chunk_tokens, and 2^62 at most in all branches. What comes
  // after the last branch's share belongs to the last branch. 0 for kCyclic.
  std::int64_t branch_tokens = 0;

  bool operator==(const ReductionOrder&) const = default;
};

}  // namespace treeattn
