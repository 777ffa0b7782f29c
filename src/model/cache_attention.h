// SPDX-License-Identifier: Apache-2.0
// Between activations, which are memory of the backend, and the cache and its attention. Nothing else in this room
// knows where the cache is: in host memory, or on the GPU that the activations are on. There nothing goes by way of the
// host on one rank, nor does prefill on several; queries and results of a decode on several do unless states go from
// GPU to GPU (kPeer).
//
// Queries are rounded to the type of the cache where that is float16 or bfloat16: the matrix instructions of CPUs and
// GPUs want both factors of one type, and a float32 query would cost them three times the work.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "kernels/cuda/ranks/rank_device.h"
#include "kernels/model_ops.h"
#include "model/activations.h"
#include "model/transcript.h"
#include "parallel/device_reduce.h"
#include "parallel/kv_store.h"
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

  // Collective. By Ring Attention: the rows are those of [first, first + count) that this rank carries. On a GPU K and
  // V are collected, whatever gather_kv says.
  void carried(int layer, SequenceId sequence, std::int64_t first, std::int64_t count, const float* q, float* out,
               bool gather_kv);
  // Collective. By Tree Attention (or the ring, if that is the strategy): one row for each sequence, its last token;
  // every rank has them all.
  void last_tokens(int layer, std::span<const SequenceId> sequences, const float* q, float* out);
  // Collective. By Tree Attention: blocks of queries anywhere in a sequence, every rank with all of them.
  void blocks(int layer, SequenceId sequence, std::span<const Block> blocks, const float* q, float* out);

  // A decode step on a GPU whose work can be recorded (ModelOps::recorded), instead of rope, write and last_tokens.
  // prepare_step says what it depends on, or nothing where there is no such step; the rest is work of the backend.
  std::vector<std::int64_t> prepare_step(std::span<const SequenceId> sequences);
  // Collective. Between the two: whether all ranks are ready to repeat a step. No GPU waits for another before.
  bool all_ready(bool ready);
  void begin_step();
  // From the rows x of a layer to its answer. normed: memory to work in, as are the results of the projections.
  struct StepInput {
    const float* x = nullptr;
    const float* norm = nullptr;
    float eps = 0;
    float* normed = nullptr;
    std::span<const kernels::Projection> qkv;
  };
  void step(int layer, std::span<const SequenceId> sequences, const StepInput& in, float* out);

  // Once the backend has finished what last_tokens or step had put on its stream: throws LostRanks where a rank was not
  // heard from, and the results are worthless.
  void confirm();

 private:
  kernels::cuda::RankDevice* device() const { return cache_.store().device(); }
  bool alone_on_gpu() const { return device() != nullptr && cache_.communicator()->size() == 1; }
  bool prepare_reduction(std::int64_t rows);
  parallel::StateShape state_shape(std::int64_t rows) const;
  parallel::ReduceContext reduction() { return {*cache_.communicator(), cache_.store().shares(), pool_, true}; }
  DType query_type() const;
  // In the type that attention wants, on the GPU or in host memory.
  const void* queries_on_gpu(const float* q, std::int64_t rows);
  const void* queries_on_host(const float* q, std::int64_t rows);
  float* host_out(std::int64_t rows);
  void from_host(float* to, std::int64_t rows);
  QueryView queries(const void* q, std::int64_t batch, std::int64_t count) const;
  const std::byte* after(const void* q, std::int64_t rows) const;
  kernels::Problem problem_of(const parallel::KvBatch& batch, const QueryView& q,
                              std::span<const std::int64_t> first_query) const;
  void attend_on_gpu(int layer, std::span<const SequenceId> sequences, const QueryView& q,
                     std::span<const std::int64_t> first_query, float* out);

  KvCache& cache_;
  std::int64_t heads_;
  kernels::ModelOps& ops_;
  ThreadPool& pool_;
  ParallelOptions how_;
  ParallelAttention attention_;
  ParallelAttention again_;  // by merge: the bits of the ring and of all strategies that promise any
  AttentionOptions options_;
  // As far as is known: whether what several ranks decode stays on GPUs, and whether they reduce it there by kernels
  // alone, so that a step can be recorded.
  bool stays_on_gpu_ = false, recordable_ = false;
  std::unique_ptr<parallel::DeviceReducer> reducer_;
  float* own_states_ = nullptr;  // where the reducer wants them
  base::Buffer q_, narrow_q_, k_, v_, out_;
  OpsArray rounded_q_;
  std::int64_t rounded_floats_ = 0;
};

}  // namespace treeattn::model
