// SPDX-License-Identifier: Apache-2.0
// bench llama --steps: decode steps of one rank after a text that is not computed, against what memory allows; on a GPU
// a prompt as well, against its tensor cores.
#pragma once

#include <cstdint>
#include <vector>

#include "model_options.h"

namespace treeattn::tools {

struct StepsBench {
  ModelPlan plan;
  std::vector<std::int64_t> tokens;   // before the step
  std::vector<std::int64_t> batches;  // sequences
  std::int64_t new_tokens = 64;       // steps that count
  std::int64_t prefill = 8192;        // tokens of the prompt, on a GPU; 0: none
  bool json = false;
};

int bench_llama_steps(const StepsBench& bench);

}  // namespace treeattn::tools
