// SPDX-License-Identifier: Apache-2.0
// How the states of the ranks become one. docs/strategies.md has steps and bytes of each.
#pragma once

#include <cstdint>
#include <string_view>

namespace treeattn {

enum class Strategy : std::uint8_t {
  kPaper,      // the paper's Algorithm 3: allreduce of the maximum, of the numerator, of the denominator
  kTwoPhase,   // allreduce of the maximum, then of denominator and numerator together
  kMerge,      // one allreduce whose operator is the merge: up a binary tree, down again
  kButterfly,  // the same by pairwise exchange: half the steps, more bytes
  kGather,     // one allgather of the states, merged by everybody
  kTwoLevel,   // inside each node, then across nodes, then back
  kRing,       // Ring Attention: K and V travel. The baseline
  kAuto,       // the cheapest with the same bits, ring apart, by the cost model and a short measurement
};

inline constexpr Strategy kAllStrategies[] = {Strategy::kPaper,     Strategy::kTwoPhase, Strategy::kMerge,
                                              Strategy::kButterfly, Strategy::kGather,   Strategy::kTwoLevel,
                                              Strategy::kRing};

// Whether out and lse have the same bits on any number of ranks: all but kPaper and kTwoPhase, whose sums follow the
// ranks.
constexpr bool same_bits(Strategy strategy) { return strategy != Strategy::kPaper && strategy != Strategy::kTwoPhase; }

// "paper", "two_phase", "merge", "butterfly", "gather", "two_level", "ring", "auto". Both throw InvalidArgument, naming
// what is accepted.
std::string_view strategy_name(Strategy strategy);
Strategy parse_strategy(std::string_view name);

}  // namespace treeattn
