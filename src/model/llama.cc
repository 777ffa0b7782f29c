// SPDX-License-Identifier: Apache-2.0
#include "model/llama.h"

#include <algorithm>
#include <atomic>
#include <random>
#include <utility>

#include "base/check.h"
#include "model/rope.h"
#include "plan/tree_order.h"
#include "treeattn/error.h"

namespace treeattn::model {
namespace {

KvCacheConfig cache_config(const LlamaConfig& config, const LlamaOptions& options) {
  return {static_cast<int>(config.layers),
          config.kv_heads,
          config.head_dim,
          config.head_dim,
          options.kv_type,
          options.kv_type,
          options.order};
}

std::int64_t new_id() {
  static std::atomic<std::int64_t> last = 0;
  return ++last;
}

std::vector<std::int64_t> positions_of(std::span<const Block> blocks) {
  std::vector<std::int64_t> out;
  for (const Block& block : blocks) {
    for (std::int64_t i = 0; i < block.count; ++i) out.push_back(block.first + i);
  }
  return out;
}

}  // namespace

Llama::Llama(std::shared_ptr<const Weights> weights, std::shared_ptr<Communicator> communicator, kernels::ModelOps& ops,
             ThreadPool& pool, const LlamaOptions& options)
    : Llama(weights, KvCache(std::move(communicator), cache_config(weights->config(), options), {}, ops.gpu()), ops,
            pool, options) {}

Llama::Llama(std::shared_ptr<const Weights> weights, KvCache cache, kernels::ModelOps& ops, ThreadPool& pool,
             const LlamaOptions& options)
    : weights_(std::move(weights)),
      ops_(ops),
      pool_(pool),
      options_(options),
      frequencies_(rope_frequencies(weights_->config())),
      cache_(std::move(cache)),
      id_(new_id()) {
  base::require(options.chunks_per_piece >= 1, "chunks_per_piece = {}; accepted: 1 or more", options.chunks_per_piece);
  attend_by(options.attention);
}

void Llama::change_attention(const ParallelOptions& options) {
  attend_by(options);
  ++attention_changes_;
}

void Llama::attend_by(const ParallelOptions& options) {
  attention_ = std::make_unique<CacheAttention>(cache_, config().heads, options, ops_, pool_);
  options_.attention = options;
}

SequenceId Llama::add_sequence() {
  const SequenceId id = cache_.add_sequence();
  transcripts_[id];
  return id;
}

SequenceId Llama::fork(SequenceId sequence) {
  const SequenceId id = cache_.fork(sequence);
  transcripts_[id] = transcript(sequence);
  return id;
}

void Llama::truncate(SequenceId sequence, std::int64_t length) {
  cache_.truncate(sequence, length);
  transcripts_.at(sequence).truncate(length);
}

void Llama::drop(SequenceId sequence) {
  cache_.drop(sequence);
  transcripts_.erase(sequence);
}

const Transcript& Llama::transcript(SequenceId sequence) const {
  const auto found = transcripts_.find(sequence);
  base::require(found != transcripts_.end(), "sequence = {}; accepted: one of the cache", sequence);
  return found->second;
}

void Llama::drop_unfinished(SequenceId sequence) { cache_.truncate(sequence, transcript(sequence).length()); }

void Llama::check_tokens(std::span<const std::int32_t> tokens, std::string_view where) const {
  const std::int64_t vocab = config().vocab;
  for (const std::int32_t token : tokens) {
    base::require(token >= 0 && token < vocab, "token = {} in {}; accepted: 0 to {}", token, where, vocab - 1);
  }
}

void Llama::check_room(SequenceId sequence, std::int64_t tokens) const {
  const std::int64_t length = transcript(sequence).length();
  base::require(length + tokens <= config().context, "{} tokens after {}; accepted: {} in all, the model's context",
                tokens, length, config().context);
}

void Llama::reserve(std::int64_t rows) {
  if (rows <= act_.rows) return;
  act_ = {};  // gives the memory back first
  act_ = Activations(ops_, config(), rows);
  ++growth_;
}

// The layers, for rows whose keys and values `attend` puts into the cache. Leaves the hidden states in act_.x.
void Llama::forward(const kernels::PassRows& pass, const Attend& attend) {
  const LlamaConfig& c = config();
  const auto rows = static_cast<std::int64_t>(pass.tokens.size());
  const float eps = static_cast<float>(c.rms_eps);
  reserve(rows);
  rows_ = rows;
  ops_.begin(pass);
  if (rows > 0) ops_.embed(weights_->embedding(), pass.tokens, act_.x.get());
  for (int layer = 0; layer < c.layers; ++layer) {
    attend(layer);
    if (rows == 0) continue;  // others attended to what this rank carries
    const LayerWeights& w = weights_->layers()[static_cast<std::size_t>(layer)];
    float* const x = act_.x.get();
    const float* const next_norm = layer + 1 < c.layers
                                       ? weights_->layers()[static_cast<std::size_t>(layer) + 1].attention_norm
                                       : weights_->final_norm();
    ops_.add_linear(w.o, act_.attended.get(), rows, x, w.feed_forward_norm);
    ops_.feed_forward({w.feed_forward_norm, eps, w.gate, w.up, w.down, act_.normed.get(), act_.gate_up.get(),
                       act_.activated.get(), next_norm},
                      rows, x);
  }
}

std::array<kernels::Projection, 3> Llama::projections(const LayerWeights& w) const {
  return {{{w.q, act_.q.get()}, {w.k, act_.k.get()}, {w.v, act_.v.get()}}};
}

// q, k and v of a layer, turned.
void Llama::project(int layer, const kernels::PassRows& pass) {
  const LlamaConfig& c = config();
  const auto rows = static_cast<std::int64_t>(pass.tokens.size());
  if (rows == 0) return;
  const LayerWeights& w = weights_->layers()[static_cast<std::size_t>(layer)];
  ops_.norm_linear(act_.x.get(), w.attention_norm, static_cast<float>(c.rms_eps), rows, act_.normed.get(),
                   projections(w));
  ops_.rope(act_.q.get(), rows, c.heads, c.head_dim, pass.positions, pass.frequencies);
  ops_.rope(act_.k.get(), rows, c.kv_heads, c.head_dim, pass.positions, pass.frequencies);
}

void Llama::prefill(SequenceId sequence, std::span<const std::int32_t> tokens, std::span<float> logits, Way way,
                    const TokenProgress& progress, const std::function<bool()>& leave) {
  base::require(!tokens.empty(), "the prompt is empty; accepted: one token or more");
  check_tokens(tokens, "the prompt");
  const auto total = static_cast<std::int64_t>(tokens.size());
  check_room(sequence, total);
  base::require(logits.empty() || logits.size() == static_cast<std::size_t>(config().vocab),
                "logits holds {} floats; accepted: 0 or the vocabulary, {}", logits.size(), config().vocab);

  const std::int64_t chunk = options_.order.chunk_tokens;
  const std::int64_t ranks = way == Way::kBlocks ? communicator()->size() : 1;
  const std::int64_t piece = options_.chunks_per_piece * ranks * chunk;
  Transcript& transcript = transcripts_.at(sequence);
  drop_unfinished(sequence);
  Transcript planned = transcript;
  planned.append(tokens, way);
  const std::int64_t begin = transcript.length(), end = planned.length();
  for (std::int64_t first = begin; first < end;) {
    const std::int64_t last = std::min(end, (first / chunk * chunk) + piece);
    const std::span<const std::int32_t> part = planned.tokens(first, last - first);
    cache_.extend(sequence, last - first);
    if (way == Way::kBlocks) {
      prefill_carried(sequence, first, part);
    } else {
      compute_blocks(sequence, planned.blocks(first, last - first, chunk), part);
    }
    first = last;
    if (first < end) {  // the last piece counts when its logits are known
      transcript = planned;
      transcript.truncate(first);
    }
    if (progress) progress(first - begin, total);
    if (first < end && leave && leave()) return;
  }
  if (!logits.empty()) last_logits(end - 1, way, logits);
  transcript = std::move(planned);
}

// Puts the rows of k and v where they belong.
void Llama::write_rows(int layer, SequenceId sequence, std::span<const Block> blocks) {
  const std::int64_t row_floats = config().kv_heads * config().head_dim;
  std::int64_t row = 0;
  for (const Block& block : blocks) {
    const std::int64_t offset = row * row_floats;
    attention_->write(layer, sequence, block.first, block.count, act_.k.get() + offset, act_.v.get() + offset);
    row += block.count;
  }
}

// The tokens of [first, first + tokens) that this rank carries; attention by the ring.
void Llama::prefill_carried(SequenceId sequence, std::int64_t first, std::span<const std::int32_t> tokens) {
  const auto count = static_cast<std::int64_t>(tokens.size());
  std::vector<Block> mine;
  std::vector<std::int32_t> my_tokens;
  for (const TokenRange& range : cache_.carried(sequence, first, count)) {
    mine.push_back({range.first, range.count});
    const auto from = tokens.begin() + (range.first - first);
    my_tokens.insert(my_tokens.end(), from, from + range.count);
  }
  const std::vector<std::int64_t> positions = positions_of(mine);
  const kernels::PassRows pass{kernels::Pass::kPrefill, my_tokens, positions, frequencies_};
  forward(pass, [&](int layer) {
    project(layer, pass);
    write_rows(layer, sequence, mine);
    attention_->carried(layer, sequence, first, count, act_.q.get(), act_.attended.get(), options_.gather_kv);
  });
}

// Blocks of one sequence, ascending, every rank with all of them; attention by the tree.
void Llama::compute_blocks(SequenceId sequence, std::span<const Block> blocks, std::span<const std::int32_t> tokens) {
  while (!blocks.empty()) {
    std::size_t count = 0, rows = 0;
    for (; count < blocks.size() && blocks[count].way == blocks[0].way; ++count) {
      rows += static_cast<std::size_t>(blocks[count].count);
    }
    compute_alike(sequence, blocks.first(count), tokens.first(rows));
    blocks = blocks.subspan(count);
    tokens = tokens.subspan(rows);
  }
}

// All of one way.
void Llama::compute_alike(SequenceId sequence, std::span<const Block> blocks, std::span<const std::int32_t> tokens) {
  const std::vector<std::int64_t> positions = positions_of(blocks);
  const kernels::Pass way = blocks[0].way == Way::kOneByOne ? kernels::Pass::kDecode : kernels::Pass::kPrefill;
  const kernels::PassRows pass{way, tokens, positions, frequencies_};
  forward(pass, [&](int layer) {
    project(layer, pass);
    write_rows(layer, sequence, blocks);
    attention_->blocks(layer, sequence, blocks, act_.q.get(), act_.attended.get());
  });
}

void Llama::decode(std::span<const SequenceId> sequences, std::span<const std::int32_t> tokens,
                   std::span<float> logits) {
  const std::size_t floats = sequences.size() * static_cast<std::size_t>(config().vocab);
  base::require(logits.size() == floats, "logits holds {} floats; accepted: sequences * vocabulary, {}", logits.size(),
                floats);
  std::ranges::copy(decode(sequences, tokens), logits.begin());
}

std::span<const float> Llama::decode(std::span<const SequenceId> sequences, std::span<const std::int32_t> tokens) {
  const std::size_t rows = sequences.size();
  base::require(rows > 0 && tokens.size() == rows, "{} tokens for {} sequences; accepted: one for each, 1 or more",
                tokens.size(), rows);
  check_tokens(tokens, "the step");
  std::vector<SequenceId> sorted(sequences.begin(), sequences.end());
  std::ranges::sort(sorted);
  if (const auto twice = std::ranges::adjacent_find(sorted); twice != sorted.end()) {
    base::throw_invalid("sequence = {} more than once in a step; accepted: once", *twice);
  }
  std::vector<std::int64_t> positions;
  for (const SequenceId id : sequences) {
    check_room(id, 1);
    positions.push_back(transcript(id).length());
  }
  for (const SequenceId id : sequences) {
    drop_unfinished(id);
    cache_.extend(id, 1);
  }
  const kernels::PassRows pass{kernels::Pass::kDecode, tokens, positions, frequencies_};
  if (std::vector<std::int64_t> key = attention_->prepare_step(sequences); !key.empty()) {
    reserve(static_cast<std::int64_t>(rows));
    reserve_logits(static_cast<std::int64_t>(rows));
    key.insert(key.end(), {id_, growth_});
    const auto all_ready = [&](bool ready) { return attention_->all_ready(ready); };
    ops_.recorded(key, pass, all_ready, [&] {
      attention_->begin_step();
      forward(pass, [&](int layer) {
        const LayerWeights& w = weights_->layers()[static_cast<std::size_t>(layer)];
        const std::array<kernels::Projection, 3> qkv = projections(w);
        attention_->step(layer, sequences,
                         {act_.x.get(), w.attention_norm, static_cast<float>(config().rms_eps), act_.normed.get(), qkv},
                         act_.attended.get());
      });
      compute_logits(act_.x.get(), static_cast<std::int64_t>(rows));
    });
    rows_ = static_cast<std::int64_t>(rows);
  } else {
    forward(pass, [&](int layer) {
      project(layer, pass);
      const std::int64_t row_floats = config().kv_heads * config().head_dim;
      for (std::size_t i = 0; i < rows; ++i) {
        const std::int64_t offset = static_cast<std::int64_t>(i) * row_floats;
        attention_->write(layer, sequences[i], positions[i], 1, act_.k.get() + offset, act_.v.get() + offset);
      }
      attention_->last_tokens(layer, sequences, act_.q.get(), act_.attended.get());
    });
    reserve_logits(static_cast<std::int64_t>(rows));
    compute_logits(act_.x.get(), static_cast<std::int64_t>(rows));
  }
  ops_.finish();
  attention_->confirm();
  for (std::size_t i = 0; i < rows; ++i) transcripts_.at(sequences[i]).append(tokens.subspan(i, 1), Way::kOneByOne);
  return {host_logits_, rows * static_cast<std::size_t>(config().vocab)};
}

// Collective after a prefill by blocks: the rank that carries the last token has its hidden state in its last row, and
// gives it to all.
void Llama::last_logits(std::int64_t position, Way way, std::span<float> logits) {
  if (way == Way::kOneByOne) return logits_of(act_.x.get() + (rows_ - 1) * config().hidden, 1, logits);
  const ReductionOrder& order = options_.order;
  const int leaf = plan::leaf_of_chunk(order, plan::chunk_of(order, position));
  const int owner = cache_.rank_of_leaf()[static_cast<std::size_t>(leaf)];
  std::vector<float> hidden(static_cast<std::size_t>(config().hidden));
  const std::size_t bytes = hidden.size() * sizeof(float);
  if (communicator()->rank() == owner) {
    ops_.to_host(hidden.data(), act_.x.get() + (rows_ - 1) * config().hidden, bytes);
  }
  communicator()->broadcast(std::as_writable_bytes(std::span(hidden)), owner);
  reserve(1);  // a rank may have had no row at all
  ops_.from_host(act_.x.get(), hidden.data(), bytes);
  logits_of(act_.x.get(), 1, logits);
}

void Llama::reserve_logits(std::int64_t rows) {
  if (rows <= logit_rows_) return;
  logits_ = OpsArray(ops_, rows * config().vocab);
  logit_rows_ = rows;
  ++growth_;
}

void Llama::compute_logits(const float* x, std::int64_t rows) {
  const kernels::Projection head{weights_->head(), logits_.get()};
  host_logits_ = ops_.norm_linear_to_host(x, weights_->final_norm(), static_cast<float>(config().rms_eps), rows,
                                          act_.normed.get(), head);
}

void Llama::logits_of(const float* x, std::int64_t rows, std::span<float> logits) {
  reserve_logits(rows);
  compute_logits(x, rows);
  ops_.finish();
  std::copy_n(host_logits_, logits.size(), logits.begin());
}

void Llama::fill(SequenceId sequence, std::int64_t tokens, std::uint32_t seed) {
  check_room(sequence, tokens);
  const std::int64_t chunk = options_.order.chunk_tokens, row_floats = config().kv_heads * config().head_dim;
  reserve(chunk);
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> rows(static_cast<std::size_t>(chunk * row_floats));
  for (float* to : {act_.k.get(), act_.v.get()}) {
    for (float& x : rows) x = normal(random);
    ops_.from_host(to, rows.data(), rows.size() * sizeof(float));
  }
  const std::int64_t begin = transcript(sequence).length();
  cache_.extend(sequence, tokens);
  for (std::int64_t first = begin; first < begin + tokens; first += chunk) {
    for (int layer = 0; layer < config().layers; ++layer) {
      attention_->write(layer, sequence, first, std::min(chunk, begin + tokens - first), act_.k.get(), act_.v.get());
    }
  }
  const std::vector<std::int32_t> said(static_cast<std::size_t>(tokens), 0);
  transcripts_.at(sequence).append(said, Way::kBlocks);
}

}  // namespace treeattn::model
