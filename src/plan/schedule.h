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

// first and count name places in Schedule::order, going round at its end: those whose contributions the message
// carries. Of a kResult these are all places.
struct Message {
  int from = 0;  // rank
  int to = 0;    // rank
  Payload payload = Payload::kPartial;
  int first = 0;
  int count = 0;

  bool operator==(const Message&) const = default;
};

// Messages of one round are independent of each other; a round begins for a rank when its messages of the last one are
// done. In a round a rank sends at most one message and receives at most one. A receiver of kPartial merges it into its
// own partial result; of kParts, keeps them beside its own; of kResult, takes it over.
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
// Allgather by doubling distances (Bruck): ceil(log2 p) rounds of p messages, every rank ends with every part.
Schedule gather_schedule(std::span<const int> order);
// A tree inside each node to its first rank, a tree over these, and back: 2 ceil(log2 ranks of the largest node) +
// 2 ceil(log2 nodes) rounds, 2 (p - 1) messages, 2 (nodes - 1) of them between nodes.
Schedule two_level_schedule(std::span<const int> node_of_rank);

// By strategy: kMerge, kButterfly, kGather or kTwoLevel, over ranks_by_node(node_of_rank).
Schedule make_schedule(Strategy strategy, std::span<const int> node_of_rank);

// States (tree nodes) a message carries; multiply by the bytes of a state block. With canonical == false every rank's
// set counts as one, and so does a united set. A kResult is 1.
//
// A rank that carries no leaf (weight 0, more ranks than branches) has the empty set. A message of 0 states is not
// sent: its sender and its receiver both skip it, and it costs nothing. The round counts all the same.
std::size_t states_in(const Message& message, const Schedule& schedule, const Shares& shares, bool canonical);

// The same for every message of rounds[k][i].
std::vector<std::vector<std::size_t>> states_of(const Schedule& schedule, const Shares& shares, bool canonical);

}  // namespace treeattn::plan
