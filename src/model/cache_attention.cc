// SPDX-License-Identifier: Apache-2.0
#include "model/cache_attention.h"

#include <cstddef>

namespace treeattn::model {

CacheAttention::CacheAttention(KvCache& cache, std::int64_t heads, const ParallelOptions& options,
                               kernels::ModelOps& ops, ThreadPool& pool)
    : cache_(cache),
      heads_(heads),
      ops_(ops),
      pool_(pool),
      attention_(cache.communicator(), options),
      again_(cache.communicator(), ParallelOptions{Strategy::kMerge}) {
  options_.causal = true;
}

const float* CacheAttention::to_host(const float* from, std::int64_t floats, base::Buffer& staging) {
  const std::size_t bytes = static_cast<std::size_t>(floats) * sizeof(float);
  if (staging.bytes() < bytes) staging = base::Buffer(bytes);
  if (bytes > 0) ops_.to_host(staging.as<float>(), from, bytes);
  return staging.as<float>();
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

QueryView CacheAttention::queries(const float* q, std::int64_t batch, std::int64_t count) const {
  return QueryView::dense(q, DType::kFloat32, batch, count, heads_, cache_.config().k_dim);
}

void CacheAttention::write(int layer, SequenceId sequence, std::int64_t first, std::int64_t count, const float* k,
                           const float* v) {
  const KvCacheConfig& config = cache_.config();
  const auto view = [&](const float* from, std::int64_t dim, base::Buffer& staging) {
    const float* rows = to_host(from, count * config.kv_heads * dim, staging);
    return KvView::tokens_first(rows, DType::kFloat32, 1, count, config.kv_heads, dim);
  };
  cache_.write(sequence, layer, first, view(k, config.k_dim, k_), view(v, config.v_dim, v_));
}

void CacheAttention::carried(int layer, SequenceId sequence, std::int64_t first, std::int64_t count, const float* q,
                             float* out, bool gather_kv) {
  std::int64_t rows = 0;
  for (const TokenRange& range : cache_.carried(sequence, first, count)) rows += range.count;
  const float* host = to_host(q, rows * heads_ * cache_.config().k_dim, q_);
  const std::span<float> result(host_out(rows), static_cast<std::size_t>(rows * heads_ * cache_.config().v_dim));
  attention_.prefill(cache_, layer, sequence, first, count, queries(host, 1, rows), options_, result, {}, pool_,
                     gather_kv);
  from_host(out, rows);
}

void CacheAttention::last_tokens(int layer, std::span<const SequenceId> sequences, const float* q, float* out) {
  const auto rows = static_cast<std::int64_t>(sequences.size());
  const float* host = to_host(q, rows * heads_ * cache_.config().k_dim, q_);
  const std::span<float> result(host_out(rows), static_cast<std::size_t>(rows * heads_ * cache_.config().v_dim));
  attention_.decode(cache_, layer, sequences, queries(host, rows, 1), options_, result, {}, pool_);
  from_host(out, rows);
}

// Blocks of one length are a batch of one call: every entry of a batch has its own kernel calls.
void CacheAttention::blocks(int layer, SequenceId sequence, std::span<const Block> blocks, const float* q, float* out) {
  std::int64_t rows = 0;
  for (const Block& block : blocks) rows += block.count;
  const float* host = to_host(q, rows * heads_ * cache_.config().k_dim, q_);
  float* result = host_out(rows);
  std::int64_t row = 0;
  for (std::size_t begin = 0; begin < blocks.size();) {
    std::vector<std::int64_t> first_query;
    std::size_t end = begin;
    while (end < blocks.size() && blocks[end].count == blocks[begin].count) first_query.push_back(blocks[end++].first);
    const auto batch = static_cast<std::int64_t>(first_query.size());
    const std::vector<SequenceId> sequences(first_query.size(), sequence);
    const std::int64_t count = batch * blocks[begin].count;
    const std::int64_t q_row = heads_ * cache_.config().k_dim, out_row = heads_ * cache_.config().v_dim;
    again_.decode(cache_, layer, sequences, queries(host + row * q_row, batch, blocks[begin].count), options_,
                  {result + row * out_row, static_cast<std::size_t>(count * out_row)}, {}, pool_, Result::kReplicated,
                  first_query);
    row += count;
    begin = end;
  }
  from_host(out, rows);
}

}  // namespace treeattn::model
