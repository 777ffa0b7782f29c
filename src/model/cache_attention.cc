// SPDX-License-Identifier: Apache-2.0
#include "model/cache_attention.h"

#include <bit>
#include <cstddef>

#include "base/half.h"
#include "parallel/agree.h"
#include "parallel/choose_link.h"
#include "parallel/tree_attention.h"
#include "treeattn/state.h"

namespace treeattn::model {
namespace {

const float* to_host(kernels::ModelOps& ops, const void* from, std::size_t bytes, base::Buffer& staging) {
  if (staging.bytes() < bytes) staging = base::Buffer(bytes);
  if (bytes > 0) ops.to_host(staging.as<std::byte>(), from, bytes);
  return staging.as<float>();
}

}  // namespace

CacheAttention::CacheAttention(KvCache& cache, std::int64_t heads, const ParallelOptions& options,
                               kernels::ModelOps& ops, ThreadPool& pool)
    : cache_(cache),
      heads_(heads),
      ops_(ops),
      pool_(pool),
      how_(options),
      attention_(cache.communicator(), options),
      again_(cache.communicator(), {.strategy = Strategy::kMerge, .canonical = options.canonical}) {
  options_.causal = true;
  stays_on_gpu_ = recordable_ = device() != nullptr && options.strategy != Strategy::kRing;
}

DType CacheAttention::query_type() const {
  const DType type = cache_.config().k_type;
  if (type == DType::kFloat16 || type == DType::kBFloat16) return type;
  // A GPU's prefill widens 8-bit keys to bfloat16, and multiplies them by such.
  return device() != nullptr && dtype_size(type) == 1 ? DType::kBFloat16 : DType::kFloat32;
}

const void* CacheAttention::queries_on_gpu(const float* q, std::int64_t rows) {
  device()->wait_for(ops_.stream());
  const DType type = query_type();
  if (type == DType::kFloat32 || rows == 0) return q;
  const std::int64_t dim = cache_.config().k_dim, floats = rows * heads_ * dim / 2;
  if (floats > rounded_floats_) {
    device()->finish();  // before what it reads is given back
    rounded_q_ = OpsArray();
    rounded_floats_ = 0;
    rounded_q_ = OpsArray(ops_, floats);
    rounded_floats_ = floats;
  }
  const KvView view = KvView::tokens_first(q, DType::kFloat32, 1, rows, heads_, dim);
  device()->store_rows(view, 0, rows, type, reinterpret_cast<std::byte*>(rounded_q_.get()), nullptr);
  return rounded_q_.get();
}

const void* CacheAttention::queries_on_host(const float* q, std::int64_t rows) {
  const DType type = query_type();
  const auto count = static_cast<std::size_t>(rows * heads_ * cache_.config().k_dim);
  if (type == DType::kFloat32) return to_host(ops_, q, count * sizeof(float), q_);
  if (device() != nullptr) {
    const void* rounded = queries_on_gpu(q, rows);
    device()->hold_up(ops_.stream());
    return to_host(ops_, rounded, count * dtype_size(type), q_);
  }
  const float* from = to_host(ops_, q, count * sizeof(float), q_);
  if (narrow_q_.bytes() < count * dtype_size(type)) narrow_q_ = base::Buffer(count * dtype_size(type));
  base::store_row_from_float(from, count, type, narrow_q_.as<std::byte>());
  return narrow_q_.as<std::byte>();
}

float* CacheAttention::host_out(std::int64_t rows) {
  const std::size_t bytes = static_cast<std::size_t>(rows * heads_ * cache_.config().v_dim) * sizeof(float);
  if (out_.bytes() < bytes) out_ = base::Buffer(bytes);
  return out_.as<float>();
}

void CacheAttention::from_host(float* to, std::int64_t rows) {
  const std::size_t bytes = static_cast<std::size_t>(rows * heads_ * cache_.config().v_dim) * sizeof(float);
  if (bytes > 0) ops_.from_host(to, out_.as<float>(), bytes);
}

QueryView CacheAttention::queries(const void* q, std::int64_t batch, std::int64_t count) const {
  return QueryView::dense(q, query_type(), batch, count, heads_, cache_.config().k_dim);
}

const std::byte* CacheAttention::after(const void* q, std::int64_t rows) const {
  const auto bytes = static_cast<std::int64_t>(dtype_size(query_type()));
  return static_cast<const std::byte*>(q) + rows * heads_ * cache_.config().k_dim * bytes;
}

kernels::Problem CacheAttention::problem_of(const parallel::KvBatch& batch, const QueryView& q,
                                            std::span<const std::int64_t> first_query) const {
  const parallel::KvStore& store = cache_.store();
  return kernels::make_problem(parallel::input_of(store, batch, q, first_query), options_,
                               &store.shares().nodes_of(cache_.communicator()->rank()));
}

// The whole tree is this rank's: what comes out is the result.
void CacheAttention::attend_on_gpu(int layer, std::span<const SequenceId> sequences, const QueryView& q,
                                   std::span<const std::int64_t> first_query, float* out) {
  const parallel::KvBatch batch = cache_.store().batch(layer, sequences);
  device()->attend_on_device(problem_of(batch, q, first_query), out);
}

void CacheAttention::write(int layer, SequenceId sequence, std::int64_t first, std::int64_t count, const float* k,
                           const float* v) {
  const KvCacheConfig& config = cache_.config();
  if (device() != nullptr) {
    const auto view = [&](const float* from, std::int64_t dim) {
      return KvView::tokens_first(from, DType::kFloat32, 1, count, config.kv_heads, dim);
    };
    return cache_.write_from_device(sequence, layer, first, view(k, config.k_dim), view(v, config.v_dim),
                                    ops_.stream());
  }
  const auto view = [&](const float* from, std::int64_t dim, base::Buffer& staging) {
    const auto bytes = static_cast<std::size_t>(count * config.kv_heads * dim) * sizeof(float);
    return KvView::tokens_first(to_host(ops_, from, bytes, staging), DType::kFloat32, 1, count, config.kv_heads, dim);
  };
  cache_.write(sequence, layer, first, view(k, config.k_dim, k_), view(v, config.v_dim, v_));
}

void CacheAttention::carried(int layer, SequenceId sequence, std::int64_t first, std::int64_t count, const float* q,
                             float* out, bool gather_kv) {
  std::int64_t rows = 0;
  for (const TokenRange& range : cache_.carried(sequence, first, count)) rows += range.count;
  if (device() != nullptr) {
    const QueryView view = queries(queries_on_gpu(q, rows), 1, rows);
    return attention_.prefill_on_device(cache_, layer, sequence, first, count, view, options_, out, ops_.stream());
  }
  const void* host = queries_on_host(q, rows);
  const std::span<float> result(host_out(rows), static_cast<std::size_t>(rows * heads_ * cache_.config().v_dim));
  attention_.prefill(cache_, layer, sequence, first, count, queries(host, 1, rows), options_, result, {}, pool_,
                     gather_kv);
  from_host(out, rows);
}

void CacheAttention::last_tokens(int layer, std::span<const SequenceId> sequences, const float* q, float* out) {
  const auto rows = static_cast<std::int64_t>(sequences.size());
  if (alone_on_gpu()) {
    attend_on_gpu(layer, sequences, queries(queries_on_gpu(q, rows), rows, 1), {}, out);
    return device()->hold_up(ops_.stream());
  }
  if (stays_on_gpu_) {
    const QueryView view = queries(queries_on_gpu(q, rows), rows, 1);
    if (attention_.decode_on_device(cache_, layer, sequences, view, options_, out, ops_.stream(), pool_)) return;
    stays_on_gpu_ = false;
  }
  const void* host = queries_on_host(q, rows);
  const std::span<float> result(host_out(rows), static_cast<std::size_t>(rows * heads_ * cache_.config().v_dim));
  attention_.decode(cache_, layer, sequences, queries(host, rows, 1), options_, result, {}, pool_);
  from_host(out, rows);
}

// Blocks of one length are a batch of one call: every entry of a batch has its own kernel calls.
void CacheAttention::blocks(int layer, SequenceId sequence, std::span<const Block> blocks, const float* q, float* out) {
  std::int64_t rows = 0;
  for (const Block& block : blocks) rows += block.count;
  const bool alone = alone_on_gpu();
  const void* all = alone ? queries_on_gpu(q, rows) : queries_on_host(q, rows);
  float* result = alone ? out : host_out(rows);
  std::int64_t row = 0;
  for (std::size_t begin = 0; begin < blocks.size();) {
    std::vector<std::int64_t> first_query;
    std::size_t end = begin;
    while (end < blocks.size() && blocks[end].count == blocks[begin].count) first_query.push_back(blocks[end++].first);
    const auto batch = static_cast<std::int64_t>(first_query.size());
    const std::vector<SequenceId> sequences(first_query.size(), sequence);
    const std::int64_t count = batch * blocks[begin].count;
    const std::int64_t out_row = heads_ * cache_.config().v_dim;
    const QueryView view = queries(after(all, row), batch, blocks[begin].count);
    if (alone) {
      attend_on_gpu(layer, sequences, view, first_query, result + row * out_row);
    } else {
      again_.decode(cache_, layer, sequences, view, options_,
                    {result + row * out_row, static_cast<std::size_t>(count * out_row)}, {}, pool_, Result::kReplicated,
                    first_query);
    }
    row += count;
    begin = end;
  }
  if (alone) return device()->hold_up(ops_.stream());
  from_host(out, rows);
}

parallel::StateShape CacheAttention::state_shape(std::int64_t rows) const {
  return {static_cast<std::size_t>(rows * heads_), state_floats(cache_.config().v_dim)};
}

// Collective. Whether there is a reduction that can be recorded. The first decode of a cache goes another way, which
// finds out whether the ranks agree on it.
bool CacheAttention::prepare_reduction(std::int64_t rows) {
  if (!recordable_ || !cache_.store().same_on_ranks()) return false;
  if (parallel::link_of(how_, cache_.store()) != DeviceLink::kPeer) return recordable_ = false;
  if (!reducer_) reducer_ = parallel::peer_reducer();
  own_states_ = reducer_->place(reduction(), state_shape(rows), *device());
  recordable_ = reducer_->recording() != 0;
  if (!recordable_) reducer_.reset();
  return recordable_;
}

std::vector<std::int64_t> CacheAttention::prepare_step(std::span<const SequenceId> sequences) {
  const KvCacheConfig& config = cache_.config();
  const bool plain = config.k_type == DType::kFloat32 || query_type() == config.k_type;
  if (device() == nullptr || !plain || sequences.empty()) return {};
  const auto rows = static_cast<std::int64_t>(sequences.size());
  if (!alone_on_gpu() && !prepare_reduction(rows)) return {};
  for (const SequenceId id : sequences) cache_.unshare(id, cache_.length(id) - 1, 1);
  const auto bytes = static_cast<std::size_t>(rows * heads_ * config.k_dim) * dtype_size(config.k_type);
  const QueryView q = queries(device()->step_queries(bytes), rows, 1);
  const parallel::KvBatch batch = cache_.store().batch(0, sequences);
  std::vector<std::int64_t> key = device()->prepare_step(problem_of(batch, q, {}), ops_.stream());
  if (alone_on_gpu()) return key;
  key.push_back(reducer_->recording());
  key.push_back(std::bit_cast<std::int64_t>(cache_.communicator()->deadline().count()));  // what kernels wait for
  for (int layer = 0; layer < config.layers; ++layer) reducer_->count_sent(*cache_.communicator());
  return key;
}

// Who is lost by now is found out at once. One rank may have to do a step as it is which another could repeat, and
// between its layers the ranks meet (DeviceReducer::reduce_on_gpu), so all of them do it.
bool CacheAttention::all_ready(bool ready) {
  if (alone_on_gpu()) return ready;
  Communicator& ranks = *cache_.communicator();
  const Traffic before = ranks.traffic();
  const bool all = !parallel::first_failed(ranks, !ready);
  ranks.reset_traffic(before);  // no part of what a decode sends
  return all;
}

void CacheAttention::begin_step() { device()->send_step(ops_.stream()); }

void CacheAttention::step(int layer, std::span<const SequenceId> sequences, const StepInput& in, float* out) {
  const parallel::KvBatch batch = cache_.store().batch(layer, sequences);
  const auto rows = static_cast<std::int64_t>(sequences.size());
  kernels::cuda::StepTarget target = device()->step_target(batch.k, batch.v);
  if (!ops_.norm_linear_step(in.x, in.norm, in.eps, rows, in.qkv, target)) {
    ops_.norm_linear(in.x, in.norm, in.eps, rows, in.normed, in.qkv);
    target.angles = ops_.angles();
    device()->store_step(target, {in.qkv[0].y, in.qkv[1].y, in.qkv[2].y}, ops_.stream());
  }
  const std::int64_t cols = heads_ * cache_.config().v_dim;
  std::uint16_t* const rounded = ops_.rounded_copy(out, rows, cols);
  if (alone_on_gpu()) return device()->attend_step(batch.k, batch.v, out, rounded, ops_.stream());
  device()->attend_step_into(batch.k, batch.v, own_states_, ops_.stream());
  reducer_->reduce_on_gpu(reduction(), state_shape(rows), *device(), {out, rounded}, ops_.stream());
}

void CacheAttention::confirm() {
  attention_.confirm();
  if (reducer_) reducer_->confirm(*cache_.communicator());
}

}  // namespace treeattn::model
