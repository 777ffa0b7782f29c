// SPDX-License-Identifier: Apache-2.0
#include "parallel/ring_attention.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/timing.h"
#include "kernels/problem.h"
#include "parallel/finalize.h"
#include "parallel/kv_ring.h"
#include "treeattn/state.h"

namespace treeattn::parallel {
namespace {

// Adds the time it lives to a sum.
class Stopwatch {
 public:
  explicit Stopwatch(double& seconds) : seconds_(seconds) {}
  ~Stopwatch() { seconds_ += base::seconds_since(start_); }

 private:
  double& seconds_;
  base::Clock::time_point start_ = base::Clock::now();
};

// Queries at consecutive positions, and what they have seen so far.
struct QueryBlock {
  QueryView q;
  std::int64_t first = 0;  // position
  std::size_t row = 0;     // of out, in tokens
  NodeStates states;
};

SharedBuffer attend(const KvBatch& batch, const AttentionInput& in, const AttentionOptions& options,
                    const plan::NodeSet& nodes, ThreadPool& pool) {
  const kernels::Problem problem = kernels::make_problem(in, options, &nodes);
  SharedBuffer states =
      make_shared_buffer(nodes.size() * static_cast<std::size_t>(problem.rows()) * state_floats(in.v.head_dim));
  parallel::attend(batch, problem, states->as<float>(), pool);
  return states;
}

// The queries on the grid of the chunks: the same on any number of ranks, and so are the kernel calls made for them.
std::vector<TokenRange> on_chunk_grid(const PrefillCall& call) {
  const std::int64_t chunk = call.store.config().order.chunk_tokens;
  std::vector<TokenRange> blocks;
  for (const TokenRange& range : call.queries) {
    const std::int64_t end = range.first + range.count;
    for (std::int64_t first = range.first; first < end; first += blocks.back().count) {
      blocks.push_back({range.sequence, first, std::min(first / chunk * chunk + chunk, end) - first});
    }
  }
  return blocks;
}

// From the row on that has so many tokens before it.
QueryView from_row(QueryView q, std::int64_t row) {
  q.data =
      static_cast<const std::byte*>(q.data) + row * q.query_stride * static_cast<std::int64_t>(dtype_size(q.dtype));
  return q;
}

std::vector<QueryBlock> query_blocks(const PrefillCall& call, ThreadPool& pool) {
  const std::size_t row_floats = state_floats(call.store.config().v_dim);
  std::vector<QueryBlock> blocks;
  std::int64_t row = 0;
  for (const TokenRange& range : on_chunk_grid(call)) {
    QueryView q = from_row(call.q, row);
    q.queries = range.count;
    NodeStates states(static_cast<std::size_t>(q.queries * q.heads), row_floats, pool);
    blocks.push_back({q, range.first, static_cast<std::size_t>(row), std::move(states)});
    row += q.queries;
  }
  return blocks;
}

// A batch of one sequence, so many times.
KvBatch repeated(const KvBatch& one, std::size_t times) {
  KvBatch out;
  out.device = one.device;
  out.lengths.assign(times, one.lengths.front());
  for (std::size_t i = 0; i < times; ++i) out.table.insert(out.table.end(), one.table.begin(), one.table.end());
  out.k = one.k;
  out.v = one.v;
  for (KvView* view : {&out.k, &out.v}) {
    view->batch = static_cast<std::int64_t>(times);
    view->page_table = out.table.data();
  }
  return out;
}

}  // namespace

SharedBuffer ring_decode(const DecodeCall& call, ThreadPool& pool, double& local_seconds) {
  const StateShape shape = call.shape();
  NodeStates states(shape.rows, shape.row_floats, pool);
  KvRing ring(call.store, call.layer, call.sequences, true);
  ring.pass_round([&](const KvBatch& batch, const plan::NodeSet& nodes) {
    const Stopwatch watch(local_seconds);
    states.add(nodes, attend(batch, input_of(call, batch), without_sinks(call.options), nodes, pool));
  });
  SharedBuffer root = make_shared_buffer(shape.block_floats());
  states.pack(root->as<float>());
  return root;
}

void check_call(const PrefillCall& call) {
  // A rank without queries needs no data: what nobody reads stands for it. All else is looked at there, too: what one
  // rank refuses the others must not wait for.
  alignas(double) static constexpr std::byte kUnread{};
  QueryView q = call.q;
  if (q.queries == 0) {
    q.data = &kUnread;
    q.queries = 1;
  }
  check_call(DecodeCall{call.store, call.layer, {&call.sequence, 1}, q, call.options, {}});
}

void ring_prefill(const PrefillCall& call, bool collect_first, std::span<float> out, std::span<float> lse,
                  ThreadPool& pool, double& local_seconds) {
  std::vector<QueryBlock> blocks = query_blocks(call, pool);
  const auto work = [&](const KvBatch& batch, const plan::NodeSet& nodes) {
    const Stopwatch watch(local_seconds);
    for (QueryBlock& block : blocks) {
      const AttentionInput in = input_of(call.store, batch, block.q, {&block.first, 1});
      block.states.add(nodes, attend(batch, in, without_sinks(call.options), nodes, pool));
    }
  };
  KvRing ring(call.store, call.layer, {&call.sequence, 1});
  collect_first ? ring.collect(work) : ring.pass_round(work);

  const std::size_t heads = static_cast<std::size_t>(call.q.heads);
  const std::size_t v_dim = static_cast<std::size_t>(call.store.config().v_dim);
  for (const QueryBlock& block : blocks) {
    const std::size_t rows = static_cast<std::size_t>(block.q.queries) * heads;
    const std::size_t first = block.row * heads;
    finalize_on(pool, {block.states.block(0), block.states.block_floats()}, call.store.config().v_dim,
                call.options.sinks, out.subspan(first * v_dim, rows * v_dim),
                lse.empty() ? lse : lse.subspan(first, rows));
  }
}

// Blocks of one length are a batch of one call: every entry of a batch has its own kernel calls.
void prefill_on_device(const PrefillCall& call, float* out) {
  const std::vector<TokenRange> blocks = on_chunk_grid(call);
  const auto work = [&](const KvBatch& batch, const plan::NodeSet& nodes) {
    std::int64_t row = 0;
    for (std::size_t begin = 0, end = 0; begin < blocks.size(); begin = end) {
      const std::int64_t count = blocks[begin].count;
      std::vector<std::int64_t> first_query;
      for (; end < blocks.size() && blocks[end].count == count; ++end) first_query.push_back(blocks[end].first);
      const KvBatch each = repeated(batch, first_query.size());
      QueryView q = from_row(call.q, row);
      q.batch = static_cast<std::int64_t>(first_query.size());
      q.queries = count;
      q.batch_stride = count * q.query_stride;
      const AttentionInput in = input_of(call.store, each, q, first_query);
      batch.device->attend_on_device(kernels::make_problem(in, call.options, &nodes),
                                     out + row * call.q.heads * call.store.config().v_dim);
      row += q.batch * count;
    }
  };
  if (call.store.communicator()->size() > 1) return KvRing(call.store, call.layer, {&call.sequence, 1}).collect(work);
  work(call.store.batch(call.layer, {&call.sequence, 1}), call.store.shares().nodes_of(0));
}

}  // namespace treeattn::parallel
