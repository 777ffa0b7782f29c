// SPDX-License-Identifier: Apache-2.0
// Tree Attention over a sharded cache: every rank attends to what it carries, the states are reduced, the root is
// finalised.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/problem.h"
#include "parallel/kv_store.h"
#include "parallel/reduce.h"
#include "plan/schedule.h"
#include "treeattn/parallel_attention.h"

namespace treeattn::parallel {

// One decode call, as every rank makes it.
struct DecodeCall {
  const KvStore& store;
  int layer = 0;
  std::span<const SequenceId> sequences;
  QueryView q;
  AttentionOptions options;
  std::span<const std::int64_t> first_query;

  StateShape shape() const;
};

// States [problem.nodes, rows] into the host's memory, computed where the batch lies: on its GPU, or here by the pool.
void attend(const KvBatch& batch, const kernels::Problem& problem, float* states, ThreadPool& pool);
// What computes the states of this rank: the name of an instruction set, or "CUDA 9.0". Ranks with the same name make
// the same bits.
std::string kernels_of(const KvStore& store);

// The attention call on one batch of keys of a cache, without the sinks, which finalize adds once. The batch must
// outlive it.
AttentionInput input_of(const KvStore& store, const KvBatch& batch, const QueryView& q,
                        std::span<const std::int64_t> first_query);
AttentionInput input_of(const DecodeCall& call, const KvBatch& batch);
AttentionOptions without_sinks(AttentionOptions options);

// Throws what attend_locally would throw for a bad call, on every rank, whatever it carries.
void check_call(const DecodeCall& call);

// Bytes of K and V of these sequences that each rank carries.
std::vector<std::uint64_t> kv_bytes_of_ranks(const KvStore& store, std::span<const SequenceId> sequences);

// The leaves: states [nodes of this rank, rows] of what this rank carries.
SharedBuffer attend_locally(const DecodeCall& call, ThreadPool& pool);

// The same, left on this rank's GPU, at `place` if that is not null; null where this rank carries nothing. Requires a
// cache on a GPU. q_on_gpu: q is there, too, which needs a place.
float* attend_on_device(const DecodeCall& call, float* place, bool q_on_gpu = false);

// Heads [first, last) that rank `rank` of `size` gets when the result is spread over the ranks.
struct HeadRange {
  std::int64_t first = 0;
  std::int64_t last = 0;
};
HeadRange heads_of_rank(std::int64_t heads, int rank, int size);

// Instead of reduce_states (reduce.h): only this rank's heads, [batch, queries, its heads].
SharedBuffer reduce_states_by_heads(const ReduceContext& context, const DecodeCall& call, SharedBuffer own);

}  // namespace treeattn::parallel
