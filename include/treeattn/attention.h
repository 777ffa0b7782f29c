// SPDX-License-Identifier: Apache-2.0
// Exact attention on one machine: the whole of it (attention), or the mergeable part of it that one range of keys
// contributes (attention_states; see treeattn/state.h).
//
//   treeattn::ThreadPool pool(treeattn::ThreadPool::available_cores());
//   treeattn::AttentionInput in;
//   in.q = treeattn::QueryView::dense(q, treeattn::DType::kBFloat16, 1, 1, 32, 128);
//   in.k = treeattn::KvView::tokens_first(k, treeattn::DType::kBFloat16, 1, tokens, 8, 128);
//   in.v = treeattn::KvView::tokens_first(v, treeattn::DType::kBFloat16, 1, tokens, 8, 128);
//   treeattn::attention(in, {}, out, lse, pool);
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "treeattn/order.h"
#include "treeattn/thread_pool.h"
#include "treeattn/views.h"

namespace treeattn {

// What is attended to. Requires: equal batch, tokens and kv_heads in k and v; equal head_dim in q and k; heads a
// multiple of kv_heads, at most 2^20 for each of these; head dims (also V's, which may differ) 16 to 256 in steps of 8.
struct AttentionInput {
  QueryView q{};
  KvView k{};
  KvView v{};
  std::span<const std::int64_t> lengths{};  // [batch] keys in use, 0 to k.tokens; empty: all k.tokens
  // Global positions. Masks and ALiBi see these, never local indices.
  std::int64_t first_key = 0;                   // position of key 0, 0 or more
  std::span<const std::int64_t> first_query{};  // [batch] position of query 0; empty: the queries are the last tokens,
                                                // first_key + length - queries
  ReductionOrder order{};                       // same keys, same order: same bits
};

// How. The logit of query i and key j, at global positions qi and kj, is
//   softcap(scale * q_i . k_j) + slope[head] * (kj - qi),   softcap(x) = cap * tanh(x / cap),
// and the key is seen unless a mask hides it.
struct AttentionOptions {
  std::optional<float> scale{};           // 0, or of size 2^-100 to 2^100; default 1 / sqrt(head_dim)
  bool causal = false;                    // hides kj > qi
  std::int64_t window = 0;                // > 0: hides kj <= qi - window, and without causal kj >= qi + window; 0: none
  float softcap = 0.0f;                   // 2^-100 to 2^100, and so is |scale| / softcap unless 0: the cap; 0: none
  std::span<const float> alibi_slopes{};  // [heads], of size 2^60 at most; empty: none
  std::span<const float> sinks{};  // [heads] a logit with no value, once per query and head: -inf, or of size 2^100
                                   // at most; empty: none
};

// out [batch, queries, heads, v.head_dim] and, unless empty, lse [batch, queries, heads] (natural log), both float32
// and dense; they may not overlap each other (InvalidArgument) or the input. A query that sees no key and has no sink
// gets out 0 and lse -inf. NaN or inf inside q, K or V shows as NaN or inf in exactly the outputs that depend on it.
// Bits depend on the inputs, the options and the instruction set, not on the pool. Thread-safe.
// Throws InvalidArgument before any work, naming the value and what is accepted.
void attention(const AttentionInput& in, const AttentionOptions& options, std::span<float> out, std::span<float> lse,
               ThreadPool& pool);

// The same, stopped before finalize: one packed state per (batch, query, head), in that order, each
// state_floats(v.head_dim) floats (treeattn/state.h). Sinks are not part of a state: options.sinks must be empty; give
// them to finalize_states once, after the last merge.
void attention_states(const AttentionInput& in, const AttentionOptions& options, std::span<float> states,
                      ThreadPool& pool);

// The instruction sets compiled in that this processor can run, best first, e.g. {"NEON_BF16", "NEON"}.
std::vector<std::string_view> available_isas();
// The one in use: the best, or what the environment variable TREEATTN_ISA names. Throws Unavailable when that names one
// that is not compiled in or that this processor lacks.
std::string_view active_isa();

}  // namespace treeattn
