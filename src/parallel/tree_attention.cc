// SPDX-License-Identifier: Apache-2.0
#include "parallel/tree_attention.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/cpu/dispatch.h"
#include "plan/tree_order.h"
#include "treeattn/state.h"

namespace treeattn::parallel {

StateShape DecodeCall::shape() const {
  return {static_cast<std::size_t>(q.batch * q.queries * q.heads), state_floats(store.config().v_dim)};
}

void attend(const KvBatch& batch, const kernels::Problem& problem, float* states, ThreadPool& pool) {
  if (batch.device != nullptr) return batch.device->attend(problem, states);
  kernels::attention_states_on(kernels::active_target(), problem, states, pool);
}

std::string kernels_of(const KvStore& store) {
  return store.device() != nullptr ? store.device()->kernels() : std::string(active_isa());
}

AttentionInput input_of(const KvStore& store, const KvBatch& batch, const QueryView& q,
                        std::span<const std::int64_t> first_query) {
  AttentionInput in;
  in.q = q;
  in.k = batch.k;
  in.v = batch.v;
  in.lengths = batch.lengths;
  in.first_query = first_query;
  in.order = store.config().order;
  return in;
}

AttentionInput input_of(const DecodeCall& call, const KvBatch& batch) {
  return input_of(call.store, batch, call.q, call.first_query);
}

AttentionOptions without_sinks(AttentionOptions options) {
  options.sinks = {};
  return options;
}

void check_call(const DecodeCall& call) {
  const KvBatch batch = call.store.batch(call.layer, call.sequences);
  const plan::NodeSet none;
  kernels::make_problem(input_of(call, batch), call.options, &none);
}

std::vector<std::uint64_t> kv_bytes_of_ranks(const KvStore& store, std::span<const SequenceId> sequences) {
  const ReductionOrder& order = store.config().order;
  const plan::Shares& shares = store.shares();
  const std::uint64_t bytes_of_token = token_bytes(store.config()).all();
  std::vector<std::uint64_t> bytes(static_cast<std::size_t>(shares.ranks()), 0);
  for (const SequenceId id : sequences) {
    const std::int64_t length = store.length(id);
    for (std::int64_t c = 0; c < plan::chunk_count(order, length); ++c) {
      const std::int64_t tokens = plan::tokens_in_chunk(order, length, c);
      const int rank = shares.rank_of(plan::leaf_of_chunk(order, c));
      bytes[static_cast<std::size_t>(rank)] += static_cast<std::uint64_t>(tokens) * bytes_of_token;
    }
  }
  return bytes;
}

SharedBuffer attend_locally(const DecodeCall& call, ThreadPool& pool) {
  const KvBatch batch = call.store.batch(call.layer, call.sequences);
  const plan::NodeSet& nodes = call.store.shares().nodes_of(call.store.communicator()->rank());
  const kernels::Problem problem = kernels::make_problem(input_of(call, batch), without_sinks(call.options), &nodes);
  SharedBuffer states = make_shared_buffer(nodes.size() * call.shape().block_floats());
  attend(batch, problem, states->as<float>(), pool);
  return states;
}

float* attend_on_device(const DecodeCall& call, float* place, bool q_on_gpu) {
  const KvBatch batch = call.store.batch(call.layer, call.sequences);
  const plan::NodeSet& nodes = call.store.shares().nodes_of(call.store.communicator()->rank());
  const kernels::Problem problem = kernels::make_problem(input_of(call, batch), without_sinks(call.options), &nodes);
  if (place == nullptr) return batch.device->attend(problem);
  batch.device->attend_into(problem, place, q_on_gpu);
  return place;
}

HeadRange heads_of_rank(std::int64_t heads, int rank, int size) {
  return {heads * rank / size, heads * (rank + 1) / size};
}

// Rows are [batch, query, head]; those of a rank's heads are put together first.
SharedBuffer reduce_states_by_heads(const ReduceContext& context, const DecodeCall& call, SharedBuffer own) {
  const StateShape shape = call.shape();
  const int size = context.communicator.size();
  const std::size_t queries = static_cast<std::size_t>(call.q.batch * call.q.queries);
  const std::size_t heads = static_cast<std::size_t>(call.q.heads);
  std::vector<std::size_t> source;  // row of `own` at each place
  std::vector<std::size_t> rows_of_rank = {0};
  for (int rank = 0; rank < size; ++rank) {
    const HeadRange range = heads_of_rank(call.q.heads, rank, size);
    for (std::size_t i = 0; i < queries; ++i) {
      for (std::int64_t h = range.first; h < range.last; ++h) source.push_back(i * heads + static_cast<std::size_t>(h));
    }
    rows_of_rank.push_back(source.size());
  }
  const std::size_t blocks = own->bytes() / sizeof(float) / shape.block_floats();
  SharedBuffer sorted = make_shared_buffer(blocks * shape.block_floats());
  for (std::size_t b = 0; b < blocks; ++b) {
    const float* from = own->as<float>() + b * shape.block_floats();
    float* to = sorted->as<float>() + b * shape.block_floats();
    for (const std::size_t row : source) to = std::copy_n(from + row * shape.row_floats, shape.row_floats, to);
  }
  return reduce_scatter(context, rows_of_rank, shape, std::move(sorted));
}

}  // namespace treeattn::parallel
