// SPDX-License-Identifier: Apache-2.0
// Names of the strategies.
#include "treeattn/strategy.h"

#include "base/check.h"

namespace treeattn {
namespace {

constexpr char kAccepted[] = "paper, two_phase, merge, butterfly, gather, two_level, ring, auto";

}  // namespace

std::string_view strategy_name(Strategy strategy) {
  switch (strategy) {
    case Strategy::kPaper:
      return "paper";
    case Strategy::kTwoPhase:
      return "two_phase";
    case Strategy::kMerge:
      return "merge";
    case Strategy::kButterfly:
      return "butterfly";
    case Strategy::kGather:
      return "gather";
    case Strategy::kTwoLevel:
      return "two_level";
    case Strategy::kRing:
      return "ring";
    case Strategy::kAuto:
      return "auto";
  }
  base::throw_invalid("strategy = {}; accepted: {}", static_cast<int>(strategy), kAccepted);
}

Strategy parse_strategy(std::string_view name) {
  for (const Strategy strategy : kAllStrategies) {
    if (name == strategy_name(strategy)) return strategy;
  }
  if (name == strategy_name(Strategy::kAuto)) return Strategy::kAuto;
  base::throw_invalid("strategy = \"{}\"; accepted: {}", name, kAccepted);
}

}  // namespace treeattn
