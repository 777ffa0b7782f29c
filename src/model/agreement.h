// SPDX-License-Identifier: Apache-2.0
// Every rank computes the same tokens; a rank that computed other bits must not go on with them.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "treeattn/communicator.h"

namespace treeattn::model {

// Of bits, 8 bytes at a time.
std::uint64_t digest_of(std::span<const float> values, std::uint64_t seed = 0);

// Collective. Throws Error on every rank, naming those whose digest is not that of most. Returns whether any rank has
// raised the flag. The digest is asked for only where there is somebody to compare with.
bool require_agreement(Communicator& communicator, const std::function<std::uint64_t()>& digest, const char* what,
                       bool flag = false);

}  // namespace treeattn::model
