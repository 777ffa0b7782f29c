// SPDX-License-Identifier: Apache-2.0
// A Llama over a sharded KV cache, seen from one rank. Every rank has all weights; only the cache is spread.
//
// Prefill: a rank computes the tokens of the chunks it carries and attends by Ring Attention. Decode: every rank
// computes every token, and attends by Tree Attention. Same tokens, same calls: the same bits on any number of ranks
// (docs/llama.md).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/model_ops.h"
#include "model/activations.h"
#include "model/cache_attention.h"
#include "model/transcript.h"
#include "model/weights.h"
#include "treeattn/communicator.h"
#include "treeattn/kv_cache.h"
#include "treeattn/llama.h"
#include "treeattn/parallel_attention.h"
#include "treeattn/thread_pool.h"

namespace treeattn::model {

class Llama {
 public:
  // ops and pool must outlive it and belong to this rank alone.
  Llama(std::shared_ptr<const Weights> weights, std::shared_ptr<Communicator> communicator, kernels::ModelOps& ops,
        ThreadPool& pool, const LlamaOptions& options = {});
  Llama(const Llama&) = delete;
  Llama& operator=(const Llama&) = delete;

  const LlamaConfig& config() const { return weights_->config(); }
  const LlamaOptions& options() const { return options_; }
  const Weights& weights() const { return *weights_; }
  const std::shared_ptr<Communicator>& communicator() const { return cache_.communicator(); }
  const KvCache& cache() const { return cache_; }

  // Another strategy for what comes next; the cache stays. The same call on every rank.
  void change_attention(const ParallelOptions& options);

  SequenceId add_sequence();
  SequenceId fork(SequenceId sequence);
  // Where it cuts a block of a prefill in two, a recovery that has to compute what is left of the block again does so
  // with fewer queries at once: then the last bits may be others (transcript.h). After what was decoded, and at the end
  // of a chunk, they are the same.
  void truncate(SequenceId sequence, std::int64_t length);
  void drop(SequenceId sequence);
  std::vector<SequenceId> sequences() const { return cache_.sequences(); }
  // The tokens whose keys and values are in the cache, in every layer.
  const Transcript& transcript(SequenceId sequence) const;

  // Throws InvalidArgument for a token beyond the vocabulary; `where` says where it stands.
  void check_tokens(std::span<const std::int32_t> tokens, std::string_view where) const;

  // Collective. Adds tokens at the end, which must be the same on every rank (Session asks). logits [vocab] of the last
  // one, on every rank; empty: not wanted. Throws InvalidArgument for no tokens, one beyond the vocabulary, or more
  // than the context.
  // With kOneByOne the bits are those of decode() token by token, at its price.
  // leave: asked between two pieces, with the same answer on every rank; true: the rest of the tokens is left out,
  // which transcript() shows, and there are no logits.
  void prefill(SequenceId sequence, std::span<const std::int32_t> tokens, std::span<float> logits,
               Way way = Way::kBlocks, const TokenProgress& progress = {}, const std::function<bool()>& leave = {});
  // Collective. Adds one token to each sequence; none may be given twice. logits [sequences, vocab].
  void decode(std::span<const SequenceId> sequences, std::span<const std::int32_t> tokens, std::span<float> logits);
  // The same; the logits are where the backend has left them for the host, until the next call.
  std::span<const float> decode(std::span<const SequenceId> sequences, std::span<const std::int32_t> tokens);
  // Adds tokens whose keys and values are random numbers: a long text for a benchmark, at once.
  void fill(SequenceId sequence, std::int64_t tokens, std::uint32_t seed);

  // After LostRanks out of any call, on every survivor: makes the group without the lost ranks, takes the cache over
  // and computes again what they had. Text that not all survivors had finished is cut off: transcript() says where to
  // go on. A change of attention that not all had made is taken back: options() says. Throws LostRanks on a rank that
  // was given up itself.
  void recover(const TokenProgress& progress = {});
  // Collective. Where `progress` of a recovery threw: computes what is still missing, before the cache is used again.
  void finish_recovery(const TokenProgress& progress = {});

  // Collective. The cache and the transcripts in one directory that all ranks see, and with them `pending`: tokens that
  // were said already but are not in the cache. load: any number of ranks; the kv type and the order are those of the
  // file. Throws BadFile.
  void save(const std::filesystem::path& directory, std::span<const std::int32_t> pending = {});
  static std::unique_ptr<Llama> load(const std::filesystem::path& directory, std::shared_ptr<const Weights> weights,
                                     std::shared_ptr<Communicator> communicator, kernels::ModelOps& ops,
                                     ThreadPool& pool, LlamaOptions options = {},
                                     std::vector<std::int32_t>* pending = nullptr);

 private:
  // Takes the rows x of a layer, and leaves the answer in `attended`; all in act_.
  using Attend = std::function<void(int layer)>;

  Llama(std::shared_ptr<const Weights> weights, KvCache cache, kernels::ModelOps& ops, ThreadPool& pool,
        const LlamaOptions& options);
  void check_room(SequenceId sequence, std::int64_t tokens) const;
  // What a call that threw left in the cache beyond the transcript.
  void drop_unfinished(SequenceId sequence);
  void reserve(std::int64_t rows);
  void forward(const kernels::PassRows& pass, const Attend& attend);
  std::array<kernels::Projection, 3> projections(const LayerWeights& w) const;
  void project(int layer, const kernels::PassRows& pass);
  void prefill_carried(SequenceId sequence, std::int64_t first, std::span<const std::int32_t> tokens);
  void compute_blocks(SequenceId sequence, std::span<const Block> blocks, std::span<const std::int32_t> tokens);
  void compute_alike(SequenceId sequence, std::span<const Block> blocks, std::span<const std::int32_t> tokens);
  void write_rows(int layer, SequenceId sequence, std::span<const Block> blocks);
  void last_logits(std::int64_t position, Way way, std::span<float> logits);
  void reserve_logits(std::int64_t rows);
  void compute_logits(const float* x, std::int64_t rows);
  void logits_of(const float* x, std::int64_t rows, std::span<float> logits);
  void attend_by(const ParallelOptions& options);
  void agree_on_attention();
  void agree_on_lengths();
  void compute_missing(const TokenProgress& progress);

  std::shared_ptr<const Weights> weights_;
  kernels::ModelOps& ops_;
  ThreadPool& pool_;
  LlamaOptions options_;
  std::vector<double> frequencies_;
  KvCache cache_;
  std::unique_ptr<CacheAttention> attention_;
  std::int64_t attention_changes_ = 0;  // how many have led to its options
  std::map<SequenceId, Transcript> transcripts_;
  std::vector<TokenRange> missing_;  // positions whose content was lost, of all ranks
  bool recovering_ = false;          // not all ranks have computed it yet
  Activations act_;
  std::int64_t rows_ = 0;  // of act_, that forward() used last
  OpsArray logits_;
  const float* host_logits_ = nullptr;  // of the backend, once its work is done
  std::int64_t logit_rows_ = 0;
  std::int64_t growth_ = 0;  // of act_ and logits_: what was recorded holds their addresses
  const std::int64_t id_;    // no other has it: what another has recorded is not for this one
};

}  // namespace treeattn::model
