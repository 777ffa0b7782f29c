// SPDX-License-Identifier: Apache-2.0
// finalize_states (treeattn/state.h) on all threads of a pool.
#pragma once

#include <cstdint>
#include <span>

#include "treeattn/thread_pool.h"

namespace treeattn::parallel {

// Requires sizes that finalize_states takes.
void finalize_on(ThreadPool& pool, std::span<const float> states, std::int64_t v_dim, std::span<const float> sinks,
                 std::span<float> out, std::span<float> lse);

}  // namespace treeattn::parallel
