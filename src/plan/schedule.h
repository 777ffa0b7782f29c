// SPDX-License-Identifier: Apache-2.0
// Who sends what to whom, round by round, for every strategy that reduces states. The reducers execute these schedules
// message by message, the cost model adds them up, so what is predicted is what is done.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "plan/shares.h"
#include "treeattn/strategy.h"

namespace treeattn::plan {

// What a message carries.
enum class Payload : std::uint8_t {
  kPartial,  // the united node set of `count` ranks: one state per node
  kParts,    // the node sets of those ranks, not united, one after the other
  kResult,   // the root: one state
};

// first and count name places in Schedule::order, going round at its end.
struct Message {
  int from = 0;  // rank
  int to = 0;    // rank
  Payload payload = Payload::kPartial;
  int first = 0;
  int count = 0;

  bool operator==(const Message&) const = default;
};

// Messages of one round are independent of each other; a round begins for a rank when its messages of the last one are
// done. A receiver of kPartial merges it into its own partial result; of kResult, takes it over.
struct Schedule {
  std::vector<int> order;  // ranks, the neighbours in the reduction next to each other
  std::vector<std::vector<Message>> rounds;

  // The messages of one rank: the same rounds with the others' left out.
  Schedule seen_by(int rank) const;
};

// Up a binary tree over `order` and down again: 2 ceil(log2 p) rounds, 2 (p - 1) messages.
Schedule tree_schedule(std::span<const int> order);
// Pairwise exchange. Where p is not a power of two, p - 2^floor(log2 p) ranks first hand their part to a neighbour and
// get the result at the end: floor(log2 p) rounds, plus 2 then.
Schedule butterfly_schedule(std::span<const int> order);
// Allgather by doubling distances: ceil(log2 p) rounds, every rank ends with every part.
Schedule gather_schedule(std::span<const int> order);
// A tree inside each node to its first rank, a tree over these, and back.
Schedule two_level_schedule(std::span<const int> node_of_rank);

// By strategy: kMerge, kButterfly, kGather or kTwoLevel.
Schedule make_schedule(Strategy strategy, std::span<const int> node_of_rank);

// States (tree nodes) a message carries; multiply by the bytes of a state block. With canonical == false every rank's
// set counts as one.
std::size_t states_in(const Message& message, const Schedule& schedule, const Shares& shares, bool canonical);

}  // namespace treeattn::plan
