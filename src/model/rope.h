// SPDX-License-Identifier: Apache-2.0
// The frequencies of rotary position embeddings.
#pragma once

#include <vector>

#include "model/config.h"

namespace treeattn::model {

// [head_dim / 2] radians per position, in double: at position 10^6 a float32 frequency would be off by radians.
std::vector<double> rope_frequencies(const LlamaConfig& config);

}  // namespace treeattn::model
