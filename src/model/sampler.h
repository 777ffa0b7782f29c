// SPDX-License-Identifier: Apache-2.0
// From logits to a token. A pure function: same logits, same text before it, same options, same position: same token,
// so that every rank draws for itself.
#pragma once

#include <cstdint>
#include <span>

#include "treeattn/llama.h"

namespace treeattn::model {

// Throws InvalidArgument, naming the option, its value and what is accepted.
void check_sampler(const SamplerOptions& options);

// said: the text so far, for the penalty. position: of the token to be chosen; it and the seed make the draw. Throws
// Error when a logit is NaN or all are -inf.
TokenChoice choose(std::span<const float> logits, std::span<const std::int32_t> said, std::int64_t position,
                   const SamplerOptions& options);

// In [0, 1), a function of the two numbers alone.
double uniform_draw(std::uint64_t seed, std::uint64_t counter);

}  // namespace treeattn::model
