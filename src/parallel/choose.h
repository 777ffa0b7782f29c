// SPDX-License-Identifier: Apache-2.0
// The choice of Strategy::kAuto: the links are measured, the cost model ranks the strategies, and those that come close
// are tried out on the real links with the real sizes.
#pragma once

#include <string>

#include "parallel/reduce.h"
#include "plan/cost.h"
#include "treeattn/strategy.h"

namespace treeattn::parallel {

// Collective. Latency and bandwidth between two ranks of one node and between two nodes, the same on every rank.
plan::Network measure_links(Communicator& communicator);

struct Choice {
  Strategy strategy = Strategy::kMerge;
  std::string why;  // a table, the chosen one marked
};

// Collective. One reduction by a strategy, as the calls to come will make it. Returns the seconds this rank took.
using Trial = std::function<double(Strategy, const plan::Schedule&)>;
// With states that go by way of the host.
Trial trial_by_host(const ReduceContext& context, StateShape shape);

// Collective. Never kPaper or kTwoPhase, which do not promise the same bits, and never kRing: a choice is kept, and
// what the ring costs grows with the sequence. network: null where states take other links than the communicator's, of
// which the model knows nothing: then everything is tried out.
Choice choose_strategy(const ReduceContext& context, const plan::Network* network, const plan::ReductionSize& size,
                       const Trial& trial);

}  // namespace treeattn::parallel
