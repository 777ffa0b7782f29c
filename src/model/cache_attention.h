// SPDX-License-Identifier: Apache-2.0
// Between activations, which are memory of the backend, and the cache and its attention, which today are in host
// memory. Nothing else in this room knows where the cache is.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "kernels/model_ops.h"
#include "model/transcript.h"
#include "treeattn/kv_cache.h"
#include "treeattn/parallel_attention.h"

namespace treeattn::model {

// One rank's. q [rows, heads, dim], k and v [rows, kv_heads, dim], out like q: memory of the backend.
class CacheAttention {
 public:
  CacheAttention(KvCache& cache, std::int64_t heads, const ParallelOptions& options, kernels::ModelOps& ops,
                 ThreadPool& pool);

  // Stores rows for positions [first, first + count) of a sequence, those this rank carries.
  void write(int layer, SequenceId sequence, std::int64_t first, std::int64_t count, const float* k, const float* v);

  // Collective. By Ring Attention: the rows are those of [first, first + count) that this rank carries.
  void carried(int layer, SequenceId sequence, std::int64_t first, std::int64_t count, const float* q, float* out,
               bool gather_kv);
  // Collective. By Tree Attention (or the ring, if that is the strategy): one row for each sequence, its last token;
  // every rank has them all.
  void last_tokens(int layer, std::span<const SequenceId> sequences, const float* q, float* out);
  // Collective. By Tree Attention: blocks of queries anywhere in a sequence, every rank with all of them.
  void blocks(int layer, SequenceId sequence, std::span<const Block> blocks, const float* q, float* out);

  const CallReport& report() const { return attention_.report(); }
  std::string why() const { return attention_.why(); }

 private:
  const float* to_host(const float* from, std::int64_t floats, base::Buffer& staging);
  float* host_out(std::int64_t rows);
  void from_host(float* to, std::int64_t rows);
  QueryView queries(const float* q, std::int64_t batch, std::int64_t count) const;

  KvCache& cache_;
  std::int64_t heads_;
  kernels::ModelOps& ops_;
  ThreadPool& pool_;
  ParallelAttention attention_;
  ParallelAttention again_;  // by merge: the bits of the ring and of all strategies that promise any
  AttentionOptions options_;
  base::Buffer q_, k_, v_, out_;
};

}  // namespace treeattn::model
