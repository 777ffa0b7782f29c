// SPDX-License-Identifier: Apache-2.0
// bench llama --steps: decode steps of one rank after a text that is not computed, against what memory allows; on a GPU
// a prompt as well, against its tensor cores.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "model_options.h"

namespace treeattn::tools {

struct StepsBench {
  static constexpr std::int64_t kWarmUp = 4;  // steps that do not: done as it is, recorded, and twice repeated

  ModelPlan plan;
  std::vector<std::int64_t> tokens;   // before the step
  std::vector<std::int64_t> batches;  // sequences
  std::int64_t new_tokens = 64;       // steps that count
  std::int64_t prefill = 8192;        // tokens of the prompt, on a GPU; 0: none
  bool json = false;

  // What a text of `before` tokens grows to. One that would leave the context begins shorter.
  std::int64_t longest(std::int64_t before) const {
    return std::min(before + kWarmUp + new_tokens, plan.model.config.context);
  }
};

int bench_llama_steps(const StepsBench& bench);

}  // namespace treeattn::tools
