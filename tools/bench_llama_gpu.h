// SPDX-License-Identifier: Apache-2.0
// bench llama on one GPU: decode steps and a prompt, against what its memory and its tensor cores allow.
#pragma once

#include <cstdint>
#include <vector>

#include "model_options.h"

namespace treeattn::tools {

struct GpuBench {
  ModelPlan plan;
  std::vector<std::int64_t> tokens;   // before the step
  std::vector<std::int64_t> batches;  // sequences
  std::int64_t new_tokens = 64;       // steps that count
  std::int64_t prefill = 8192;        // tokens of the prompt; 0: none
  bool json = false;
};

int bench_llama_on_gpu(const GpuBench& bench);

}  // namespace treeattn::tools
