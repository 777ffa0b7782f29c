// SPDX-License-Identifier: Apache-2.0
// A sharded KV cache full of noise, and what attention over it must give, in double precision.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "options.h"
#include "treeattn/kv_cache.h"
#include "treeattn/thread_pool.h"
#include "treeattn/views.h"

namespace treeattn::tools {

// Adds shape.batch sequences of `tokens` tokens. Every rank makes what it carries and nothing else, a chunk at a time.
std::vector<SequenceId> fill_cache(KvCache& cache, const Shape& shape, std::int64_t tokens, std::uint64_t seed,
                                   ThreadPool& pool);

struct DecodeReference {
  std::vector<double> out;   // [batch, queries, heads, v_dim]
  double largest_value = 0;  // |v|, of all tokens
};

// Collective. Plain loops over the rows that are stored, scales included: nothing of the library's kernels, operator
// and strategies is used. Every query sees every key.
DecodeReference reference_decode(const KvCache& cache, std::span<const SequenceId> sequences, const QueryView& q,
                                 ThreadPool& pool);

}  // namespace treeattn::tools
