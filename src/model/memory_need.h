// SPDX-License-Identifier: Apache-2.0
// How much memory a text of some length takes, before any of it is taken.
#pragma once

#include <cstddef>
#include <cstdint>

#include "model/config.h"
#include "treeattn/llama.h"

namespace treeattn::model {

// Bytes, on the rank that has most.
struct MemoryNeed {
  std::size_t weights = 0;      // one copy; ranks that are threads share it
  std::size_t cache = 0;        // K and V of all layers
  std::size_t activations = 0;  // of one piece of the prompt, copies for the attention call included
  std::size_t passing = 0;      // K and V of one layer on their way round, and the states of the piece

  std::size_t of_rank() const { return cache + activations + passing; }
};

MemoryNeed memory_need(const LlamaConfig& config, const LlamaOptions& options, WeightFormat format, std::int64_t tokens,
                       int ranks);

// So many ranks, each on a machine of its own with so many bytes, have room for the text, and one less have not; 0: no
// number has, as the weights alone are too large, or a branch is.
int ranks_needed(const LlamaConfig& config, const LlamaOptions& options, WeightFormat format, std::int64_t tokens,
                 std::size_t machine_bytes);

}  // namespace treeattn::model
