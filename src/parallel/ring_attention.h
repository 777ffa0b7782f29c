// SPDX-License-Identifier: Apache-2.0
// Ring Attention: K and V travel, the queries stay. The baseline for decode, and the way to prefill.
#pragma once

#include <cstdint>
#include <span>

#include "parallel/tree_attention.h"

namespace treeattn::parallel {

// Every rank attends to all of K and V as they pass by. Returns the root's state; local_seconds gets the time spent
// attending. The pieces are merged along the canonical tree, so the bits are those of Tree Attention.
SharedBuffer ring_decode(const DecodeCall& call, ThreadPool& pool, double& local_seconds);

// Many queries, each rank with its own. `queries` are the positions of call.q's rows, in order.
struct PrefillCall {
  const KvStore& store;
  int layer = 0;
  SequenceId sequence = 0;
  QueryView q;  // [1, tokens of `queries`, heads, k_dim]
  std::span<const TokenRange> queries;
  AttentionOptions options;
};

// As check_call of a decode, also on a rank without a query of its own.
void check_call(const PrefillCall& call);

// out [tokens, heads, v_dim], lse [tokens, heads] or empty. collect_first: all of K and V are collected before the work
// begins.
void ring_prefill(const PrefillCall& call, bool collect_first, std::span<float> out, std::span<float> lse,
                  ThreadPool& pool, double& local_seconds);

// The same with q and out in memory of this rank's GPU, where all of K and V are collected first. Work on the stream of
// the GPU (RankDevice), which may be under way when this returns. Requires a cache on a GPU.
void prefill_on_device(const PrefillCall& call, float* out);

}  // namespace treeattn::parallel
