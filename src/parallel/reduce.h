// SPDX-License-Identifier: Apache-2.0
// From the states of every rank's part of the tree to the state of the root, on every rank: one function per way to get
// there. This is where merge (the operator), plan (the schedule) and comm (the bytes) meet.
#pragma once

#include <span>

#include "parallel/node_states.h"
#include "plan/schedule.h"
#include "treeattn/communicator.h"

namespace treeattn::parallel {

// What is reduced.
struct StateShape {
  std::size_t rows = 0;
  std::size_t row_floats = 0;  // v_dim + 2
  std::size_t block_floats() const { return rows * row_floats; }
};

// What all reductions of one cache on one communicator share.
struct ReduceContext {
  Communicator& communicator;
  const plan::Shares& shares;
  ThreadPool& pool;
  bool canonical = true;

  // What a rank brings, as nodes: those of its share, or, in the free order, its place as if that were a leaf.
  plan::NodeSet part(int rank, int place) const;
  // What a message of merged states brings: the nodes of all its parts together, in the free order as one.
  plan::NodeSet merged_parts(const plan::Message& message, const plan::Schedule& schedule) const;
};

// Executes a schedule (kMerge, kButterfly, kGather, kTwoLevel). `schedule` may be one rank's view of it. `own` holds
// the blocks of this rank's nodes, one after the other, and is used up. What is returned begins with the root's block.
SharedBuffer reduce_by_schedule(const ReduceContext& context, const plan::Schedule& schedule, StateShape shape,
                                SharedBuffer own);

// The paper's Algorithm 3 (three allreduces), and the same with two. In float32, in the order of the ranks.
SharedBuffer reduce_as_in_paper(const ReduceContext& context, StateShape shape, SharedBuffer own);
SharedBuffer reduce_in_two_phases(const ReduceContext& context, StateShape shape, SharedBuffer own);

// The one of these that a strategy is: any but kRing and kAuto.
SharedBuffer reduce_states(Strategy strategy, const plan::Schedule& schedule, const ReduceContext& context,
                           StateShape shape, SharedBuffer own);

// Rows [rows_of_rank[r], rows_of_rank[r + 1]) of the root go to rank r alone: everybody sends each rank its rows. `own`
// must have its rows in that order. One round of size - 1 messages.
SharedBuffer reduce_scatter(const ReduceContext& context, std::span<const std::size_t> rows_of_rank, StateShape shape,
                            SharedBuffer own);

}  // namespace treeattn::parallel
