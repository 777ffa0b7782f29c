// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "kernels/cuda/ranks/node_plan.h"
#include "treeattn/state.h"

namespace treeattn::kernels::cuda {
namespace {

constexpr std::size_t kAlignment = 256;

constexpr std::size_t aligned(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

std::size_t table_entries(const KvView& view) {
  const bool none = view.page_tokens == 0 || view.page_table == nullptr;  // without tokens there need not be a table
  return none ? 0 : static_cast<std::size_t>(view.batch * view.pages_per_sequence);
}

std::size_t query_bytes(const QueryView& q) {
  return static_cast<std::size_t>(q.batch * q.queries * q.heads * q.head_dim) * dtype_size(q.dtype);
}

// Of some of the batch's sequences.
Problem part_of(const Problem& all, std::int64_t first, std::int64_t count) {
  const auto moved = [](const void* data, DType type, std::int64_t elements) {
    return static_cast<const std::byte*>(data) + elements * static_cast<std::int64_t>(dtype_size(type));
  };
  Problem part = all;
  part.q.data = moved(all.q.data, all.q.dtype, first * all.q.batch_stride);
  part.q.batch = count;
  for (KvView* view : {&part.k, &part.v}) {
    view->batch = count;
    if (view->page_tokens == 0) view->data = moved(view->data, view->dtype, first * view->batch_stride);
    if (view->page_tokens == 0 && view->scales != nullptr) view->scales += first * view->scale_batch_stride;
    if (view->page_table != nullptr) view->page_table += first * view->pages_per_sequence;
  }
  part.lengths = {all.lengths.begin() + first, all.lengths.begin() + first + count};
  part.first_query = {all.first_query.begin() + first, all.first_query.begin() + first + count};
  return part;
}

// A call that can be cut takes no more memory than this for states on their way.
constexpr std::size_t kMostWorkspace = std::size_t{1} << 30;

}  // namespace

NodePlan::NodePlan(int multiprocessors, cudaStream_t stream) : multiprocessors_(multiprocessors), stream_(stream) {
  check(cudaEventCreateWithFlags(&sent_, cudaEventDisableTiming), "event");
}

NodePlan::~NodePlan() { cudaEventDestroy(sent_); }

// Room for so many bytes; a quarter more than is needed, so that a growing sequence allocates now and then only.
void NodePlan::begin(Tables& tables, std::size_t bytes) {
  check(recorded_ ? cudaEventSynchronize(sent_) : cudaStreamSynchronize(stream_), "last copy of tables");
  tables.used = 0;
  if (tables.host.bytes() >= bytes) return;
  check(cudaStreamSynchronize(stream_), "last call");
  ++growth_;
  tables.device = DeviceBuffer(bytes + bytes / 4);
  tables.host.resize(tables.device.bytes());  // last: where one of the two throws, the next call finds too little here
}

template <class T>
T* NodePlan::put(Tables& tables, const T* from, std::size_t count) {
  if (count == 0) return nullptr;
  const std::size_t at = tables.used;
  std::memcpy(tables.host.data() + at, from, count * sizeof(T));
  tables.used = at + aligned(count * sizeof(T));
  return reinterpret_cast<T*>(tables.device.as<std::byte>() + at);
}

void NodePlan::send(const Tables& tables, bool record) {
  if (tables.used == 0) return;
  check(cudaMemcpyAsync(tables.device.as<void>(), tables.host.data(), tables.used, cudaMemcpyHostToDevice, stream_),
        "copy of tables");
  if (record) check(cudaEventRecord(sent_, stream_), "event");
  recorded_ = record;
}

void NodePlan::grow(DeviceBuffer& buffer, std::size_t bytes, bool zero) {
  if (buffer.bytes() >= bytes) return;
  check(cudaStreamSynchronize(stream_), "last call");
  ++growth_;
  buffer = DeviceBuffer(bytes + bytes / 4);
  if (zero) check(cudaMemsetAsync(buffer.as<void>(), 0, buffer.bytes(), stream_), "clearing of counters");
}

// Dense, whatever the strides were: the same alignment, and so the same kernel, on every rank.
const std::byte* NodePlan::put_queries(const QueryView& q) {
  const std::size_t at = step_.used;
  const std::size_t row = static_cast<std::size_t>(q.head_dim) * dtype_size(q.dtype);
  std::byte* to = step_.host.data() + at;
  for (std::int64_t b = 0; b < q.batch; ++b) {
    for (std::int64_t i = 0; i < q.queries; ++i) {
      for (std::int64_t h = 0; h < q.heads; ++h, to += row) std::memcpy(to, query_row(q, b, i, h), row);
    }
  }
  step_.used = at + aligned(query_bytes(q));
  return step_.device.as<std::byte>() + at;
}

// Shapes and nodes, and for every query the chunks where what it sees begins and ends: a split may leave out what
// nobody sees.
NodePlan::SplitKey NodePlan::split_key(const Problem& problem) {
  SplitKey key = {problem.q.batch,
                  problem.q.queries,
                  problem.q.heads,
                  static_cast<std::int64_t>(problem.q.dtype),
                  problem.k.kv_heads,
                  problem.k.head_dim,
                  problem.v.head_dim,
                  static_cast<std::int64_t>(problem.k.dtype),
                  static_cast<std::int64_t>(problem.v.dtype),
                  problem.first_key,
                  problem.order.chunk_tokens,
                  problem.order.branches,
                  static_cast<std::int64_t>(problem.order.placement),
                  problem.order.branch_tokens,
                  problem.causal,
                  problem.window,
                  problem.softcap != 0,
                  static_cast<std::int64_t>(problem.alibi_slopes.size()),
                  static_cast<std::int64_t>(problem.sinks.size())};
  for (const plan::TreeNode& node : problem.nodes) {
    key.push_back(node.level);
    key.push_back(node.index);
  }
  const auto chunk = [&](std::int64_t position) { return position / problem.order.chunk_tokens; };
  for (std::int64_t b = 0; b < problem.q.batch; ++b) {
    key.push_back(chunk(problem.lengths[static_cast<std::size_t>(b)]));
    for (std::int64_t i = 0; i < problem.q.queries; ++i) {
      const KeyRange range = problem.visible(b, i);
      key.push_back(range.empty() ? -1 : chunk(problem.first_key + range.begin));
      key.push_back(range.empty() ? -1 : chunk(problem.first_key + range.end - 1));
    }
  }
  return key;
}

// False, and nothing is changed, where the split wants more workspace than `most`.
bool NodePlan::update_split(const Problem& problem, const Launch& launch, std::size_t most) {
  SplitKey key = split_key(problem);
  key.push_back(reinterpret_cast<std::intptr_t>(launch.kernel));
  if (key == key_) return work_.workspace_bytes <= most;
  Work work = split(problem, launch);
  if (work.workspace_bytes > most) return false;
  key_.clear();
  work_ = std::move(work);
  begin(split_, aligned(work_.items.size() * sizeof(WorkItem)));
  items_ = put(split_, work_.items.data(), work_.items.size());
  send(split_);
  grow(workspace_, work_.workspace_bytes, false);
  grow(arrived_, work_.counters * sizeof(unsigned), true);
  key_ = std::move(key);
  return true;
}

// The tables of a call into step_, and params that point to their copies. problem.q becomes the copy as well.
AttentionParams NodePlan::put_step(Problem& problem, bool q_on_gpu) {
  const std::size_t k_entries = table_entries(problem.k), v_entries = table_entries(problem.v);
  const bool same_table = problem.k.page_table == problem.v.page_table && k_entries == v_entries;
  begin(step_, aligned(q_on_gpu ? 0 : query_bytes(problem.q)) +
                   2 * aligned(problem.lengths.size() * sizeof(std::int64_t)) +
                   aligned(k_entries * sizeof(std::int32_t)) + aligned(v_entries * sizeof(std::int32_t)) +
                   aligned(problem.alibi_slopes.size_bytes()) + aligned(problem.sinks.size_bytes()));
  if (!q_on_gpu) {
    problem.q = QueryView::dense(put_queries(problem.q), problem.q.dtype, problem.q.batch, problem.q.queries,
                                 problem.q.heads, problem.q.head_dim);
  }
  AttentionParams p = params_of(problem);
  p.lengths = put(step_, problem.lengths.data(), problem.lengths.size());
  p.first_query = put(step_, problem.first_query.data(), problem.first_query.size());
  p.k.page_table = put(step_, problem.k.page_table, k_entries);
  p.v.page_table = same_table ? p.k.page_table : put(step_, problem.v.page_table, v_entries);
  p.alibi_slopes = put(step_, problem.alibi_slopes.data(), problem.alibi_slopes.size());
  p.sinks = put(step_, problem.sinks.data(), problem.sinks.size());
  return p;
}

// The kernel, the split and what they need, into params. No kernel where the workspace would be larger than `most`.
Launch NodePlan::prepare(const Problem& problem, AttentionParams& p, std::size_t most) {
  const Launch launch = prepare_launch(problem, multiprocessors_, p);
  if (!update_split(problem, launch, most)) return {};
  set_work(work_, {items_, workspace_.as<std::byte>(), arrived_.as<unsigned>()}, p);
  kernel_ = launch.name;
  return launch;
}

float* NodePlan::run(Problem problem) {
  const auto floats =
      problem.nodes.size() * static_cast<std::size_t>(problem.rows()) * state_floats(problem.v.head_dim);
  if (floats == 0) return nullptr;
  grow(states_, floats * sizeof(float), false);
  AttentionParams p = put_step(problem, false);
  send(step_, false);  // who asks for states waits for them before the next call
  const Launch launch = prepare(problem, p);
  p.states = states_.as<float>();
  start(launch, p, stream_);
  return states_.as<float>();
}

void NodePlan::run(Problem problem, float* out) {
  if (problem.rows() == 0) return;
  const std::int64_t batch = problem.q.batch, half = batch / 2;
  AttentionParams p = put_step(problem, true);
  const Launch launch = half > 0 ? prepare(problem, p, kMostWorkspace) : prepare(problem, p);
  if (launch.kernel == nullptr) {
    run(part_of(problem, 0, half), out);
    return run(part_of(problem, half, batch - half), out + problem.rows() / batch * half * problem.v.head_dim);
  }
  send(step_);
  p.out = out;
  start(launch, p, stream_);
}

void NodePlan::run_into(Problem problem, float* states, bool q_on_gpu) {
  if (problem.nodes.empty() || problem.rows() == 0) return;
  AttentionParams p = put_step(problem, q_on_gpu);
  send(step_, q_on_gpu);  // else who asks for states waits for them before the next call
  const Launch launch = prepare(problem, p);
  p.states = states;
  start(launch, p, stream_);
}

std::vector<std::int64_t> NodePlan::prepare_step(Problem problem) {
  const AttentionParams params = put_step(problem, true);
  SplitKey key = split_key(problem);
  key.push_back(problem.k.pages_per_sequence);
  key.push_back(problem.k.pages);
  key.push_back(growth_);
  if (key == step_key_) return key;  // the tables have other content, and lie where they did
  step_key_.clear();                 // of nothing, should the rest throw
  step_params_ = params;
  step_launch_ = prepare(problem, step_params_);
  key.back() = growth_;
  step_key_ = key;
  return key;
}

void NodePlan::send_step(cudaStream_t stream) {
  check(cudaMemcpyAsync(step_.device.as<void>(), step_.host.data(), step_.used, cudaMemcpyHostToDevice, stream),
        "copy of tables");
}

// Of a layer, but for where the result goes.
AttentionParams NodePlan::step_params(const KvView& k, const KvView& v) const {
  AttentionParams p = step_params_;
  p.k.data = static_cast<const std::byte*>(k.data);
  p.v.data = static_cast<const std::byte*>(v.data);
  p.tensor_copies = p.tensor_copies && make_tensor_maps(k, v, step_launch_, p);
  return p;
}

void NodePlan::step(const KvView& k, const KvView& v, float* out, std::uint16_t* rounded_out, bool early,
                    cudaStream_t stream) {
  AttentionParams p = step_params(k, v);
  p.out = out;
  p.rounded_out = rounded_out;
  start(step_launch_, p, stream, early);
}

void NodePlan::step_into(const KvView& k, const KvView& v, float* states, bool early, cudaStream_t stream) {
  if (step_params_.item_count == 0) return;  // this rank has no nodes
  AttentionParams p = step_params(k, v);
  p.states = states;
  start(step_launch_, p, stream, early);
}

void* NodePlan::step_queries(std::size_t bytes) {
  grow(step_queries_, bytes, false);
  return step_queries_.as<void>();
}

}  // namespace treeattn::kernels::cuda
