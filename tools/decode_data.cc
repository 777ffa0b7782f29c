// SPDX-License-Identifier: Apache-2.0
#include "decode_data.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "base/buffer.h"
#include "base/half.h"
#include "bench_data.h"
#include "parallel/agree.h"
#include "parallel/kv_store.h"

namespace treeattn::tools {
namespace {

// One chunk of K or V on its way into a cache.
class ChunkMaker {
 public:
  ChunkMaker(const Shape& shape, std::int64_t chunk_tokens, std::uint64_t seed)
      : shape_(shape),
        maker_(shape.dtype, shape.kv_heads, shape.head_dim, seed),
        rows_(static_cast<std::size_t>(chunk_tokens) * maker_.token_bytes()) {
    if (shape.dtype == DType::kInt8) {
      scales_.assign(static_cast<std::size_t>(chunk_tokens * shape.kv_heads), TokenMaker::int8_scale());
    }
  }

  KvView make(TokenMaker::Part part, std::int64_t sequence, std::int64_t first, std::int64_t count, ThreadPool& pool) {
    pool.run(static_cast<std::size_t>(count), [&](std::size_t i, int) {
      maker_.make(part, sequence, first + static_cast<std::int64_t>(i),
                  rows_.as<std::byte>() + i * maker_.token_bytes(), maker_.row_bytes());
    });
    const KvView view =
        KvView::tokens_first(rows_.as<std::byte>(), shape_.dtype, 1, count, shape_.kv_heads, shape_.head_dim);
    return scales_.empty() ? view : view.with_scales(scales_.data());
  }

 private:
  const Shape& shape_;
  TokenMaker maker_;
  base::Buffer rows_;
  std::vector<float> scales_;
};

void load_row(const std::byte* row, DType type, const float* scale, std::span<double> out) {
  const double factor = scale == nullptr ? 1.0 : static_cast<double>(*scale);
  const std::size_t size = dtype_size(type);
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i] = factor * static_cast<double>(base::load_as_float(row + i * size, type));
  }
}

// A state in double precision: [max, sum, weighted values ...], natural logarithms.
void add_key(double* state, double logit, std::span<const double> value) {
  if (logit > state[0]) {
    const double shrink = std::exp(state[0] - logit);
    for (std::size_t i = 0; i <= value.size(); ++i) state[1 + i] *= shrink;
    state[0] = logit;
  }
  const double weight = std::exp(logit - state[0]);
  state[1] += weight;
  for (std::size_t i = 0; i < value.size(); ++i) state[2 + i] += weight * value[i];
}

void merge_state(double* lower, const double* higher, std::size_t doubles) {
  if (higher[1] == 0) return;
  const double top = std::max(lower[0], higher[0]);
  const double a = lower[1] == 0 ? 0 : std::exp(lower[0] - top), b = std::exp(higher[0] - top);
  lower[0] = top;
  for (std::size_t i = 1; i < doubles; ++i) lower[i] = a * lower[i] + b * higher[i];
}

// Some chunks that this rank carries, where the host can read them: where they are, or copies from a GPU.
class ReadableChunks {
 public:
  struct Chunk {
    std::size_t batch = 0;  // which of the sequences
    std::int64_t number = 0;
    parallel::ChunkMemory memory;
  };

  ReadableChunks(const KvCache& cache, std::span<const SequenceId> sequences) : cache_(cache), sequences_(sequences) {
    const std::int64_t tokens = cache.config().order.chunk_tokens;
    for (std::size_t b = 0; b < sequences.size(); ++b) {
      for (const TokenRange& range : cache.carried(sequences[b], 0, cache.length(sequences[b]))) {
        for (std::int64_t first = range.first; first < range.first + range.count; first += tokens) {
          all_.push_back({b, first / tokens, {}});
        }
      }
    }
  }

  // The next ones, until there are none. Those of a GPU are copied some at a time.
  std::span<const Chunk> next() {
    parallel::KvMemory& memory = cache_.store().pool().backend();
    const bool copy = memory.device() != nullptr;
    const std::size_t first = done_;
    copies_.clear();
    for (std::size_t bytes = 0; done_ < all_.size() && (!copy || bytes < kCopiedAtOnce); ++done_) {
      Chunk& chunk = all_[done_];
      chunk.memory = cache_.store().chunk(0, sequences_[chunk.batch], chunk.number);
      if (copy) bytes += copy_to_host(chunk.memory, memory);
    }
    if (copy) memory.finish();
    return std::span(all_).subspan(first, done_ - first);
  }

 private:
  static constexpr std::size_t kCopiedAtOnce = std::size_t{256} << 20;

  std::size_t copy_to_host(parallel::ChunkMemory& chunk, parallel::KvMemory& memory) {
    const parallel::TokenBytes bytes = parallel::token_bytes(cache_.config());
    const auto tokens = static_cast<std::size_t>(chunk.tokens);
    base::Buffer& here = copies_.emplace_back(tokens * bytes.all());
    std::byte* at = here.as<std::byte>();
    const auto move = [&](auto*& part, std::size_t part_bytes) {
      if (part == nullptr) return;
      memory.copy_out(at, reinterpret_cast<const std::byte*>(part), part_bytes);
      part = reinterpret_cast<std::remove_reference_t<decltype(part)>>(at);
      at += part_bytes;
    };
    move(chunk.k, tokens * bytes.k);
    move(chunk.v, tokens * bytes.v);
    move(chunk.k_scales, tokens * bytes.k_scales);
    move(chunk.v_scales, tokens * bytes.v_scales);
    return here.bytes();
  }

  const KvCache& cache_;
  std::span<const SequenceId> sequences_;
  std::vector<Chunk> all_;
  std::size_t done_ = 0;
  std::vector<base::Buffer> copies_;
};

// One KV head of one sequence.
class HeadReference {
 public:
  HeadReference(const KvCache& cache, const QueryView& q, std::int64_t batch, std::int64_t kv_head)
      : config_(cache.config()),
        kv_head_(static_cast<std::size_t>(kv_head)),
        key_(static_cast<std::size_t>(config_.k_dim)),
        value_(static_cast<std::size_t>(config_.v_dim)) {
    const std::int64_t group = q.heads / config_.kv_heads;
    const double scale = 1 / std::sqrt(static_cast<double>(q.head_dim));
    for (std::int64_t i = 0; i < q.queries; ++i) {
      for (std::int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
        const std::int64_t at = batch * q.batch_stride + i * q.query_stride + h * q.head_stride;
        std::vector<double>& row = queries_.emplace_back(key_.size());
        load_row(static_cast<const std::byte*>(q.data) + at * static_cast<std::int64_t>(dtype_size(q.dtype)), q.dtype,
                 nullptr, row);
        for (double& x : row) x *= scale;
        rows_.push_back(static_cast<std::size_t>((batch * q.queries + i) * q.heads + h));
      }
    }
  }

  // states [rows of all heads, v_dim + 2]. Returns the largest |v|.
  double add(const parallel::ChunkMemory& memory, double* states) {
    double largest = 0;
    const std::size_t heads = static_cast<std::size_t>(config_.kv_heads);
    for (std::size_t t = 0; t < static_cast<std::size_t>(memory.tokens); ++t) {
      const std::size_t row = t * heads + kv_head_;
      load_row(memory.k + row * key_.size() * dtype_size(config_.k_type), config_.k_type,
               memory.k_scales ? memory.k_scales + row : nullptr, key_);
      load_row(memory.v + row * value_.size() * dtype_size(config_.v_type), config_.v_type,
               memory.v_scales ? memory.v_scales + row : nullptr, value_);
      for (const double x : value_) largest = std::max(largest, std::fabs(x));
      for (std::size_t i = 0; i < queries_.size(); ++i) {
        double logit = 0;
        for (std::size_t d = 0; d < key_.size(); ++d) logit += queries_[i][d] * key_[d];
        add_key(states + rows_[i] * (value_.size() + 2), logit, value_);
      }
    }
    return largest;
  }

 private:
  const KvCacheConfig& config_;
  std::size_t kv_head_;
  std::vector<double> key_, value_;
  std::vector<std::vector<double>> queries_;  // scaled, of this head's group
  std::vector<std::size_t> rows_;             // [queries_] of states
};

}  // namespace

std::vector<SequenceId> fill_cache(KvCache& cache, const Shape& shape, std::int64_t tokens, std::uint64_t seed,
                                   ThreadPool& pool) {
  const std::int64_t chunk = std::min(tokens, cache.config().order.chunk_tokens);
  ChunkMaker keys(shape, chunk, seed), values(shape, chunk, seed);
  std::vector<SequenceId> ids;
  for (std::int64_t b = 0; b < shape.batch; ++b) {
    ids.push_back(cache.add_sequence());
    cache.extend(ids.back(), tokens);
    for (const TokenRange& range : cache.carried(ids.back(), 0, tokens)) {
      for (std::int64_t done = 0; done < range.count; done += chunk) {
        const std::int64_t first = range.first + done, count = std::min(chunk, range.count - done);
        const KvView k = keys.make(TokenMaker::Part::kKeys, b, first, count, pool);
        const KvView v = values.make(TokenMaker::Part::kValues, b, first, count, pool);
        cache.write(ids.back(), 0, first, k, v);
      }
    }
  }
  return ids;
}

DecodeReference reference_decode(const KvCache& cache, std::span<const SequenceId> sequences, const QueryView& q,
                                 ThreadPool& pool) {
  const std::size_t rows = static_cast<std::size_t>(q.batch * q.queries * q.heads);
  const std::size_t kv_heads = static_cast<std::size_t>(cache.config().kv_heads);
  const std::size_t v_dim = static_cast<std::size_t>(cache.config().v_dim);
  const std::size_t doubles = v_dim + 2;
  std::vector<double> states(rows * doubles, 0.0);
  for (std::size_t r = 0; r < rows; ++r) states[r * doubles] = -std::numeric_limits<double>::infinity();
  std::vector<double> largest(sequences.size() * kv_heads, 0.0);
  ReadableChunks chunks(cache, sequences);
  for (auto some = chunks.next(); !some.empty(); some = chunks.next()) {
    pool.run(largest.size(), [&](std::size_t task, int) {
      const std::size_t b = task / kv_heads;
      HeadReference head(cache, q, static_cast<std::int64_t>(b), static_cast<std::int64_t>(task % kv_heads));
      for (const ReadableChunks::Chunk& chunk : some) {
        if (chunk.batch == b) largest[task] = std::max(largest[task], head.add(chunk.memory, states.data()));
      }
    });
  }

  DecodeReference reference;
  Communicator& world = *cache.communicator();
  world.allreduce(std::as_writable_bytes(std::span(states)), doubles * sizeof(double),
                  [&](std::byte* lower, const std::byte* higher, std::size_t count) {
                    for (std::size_t i = 0; i < count; ++i) {
                      merge_state(reinterpret_cast<double*>(lower) + i * doubles,
                                  reinterpret_cast<const double*>(higher) + i * doubles, doubles);
                    }
                  });
  reference.largest_value = parallel::largest_of_ranks(world, *std::max_element(largest.begin(), largest.end()));
  for (std::size_t r = 0; r < rows; ++r) {
    const double* state = states.data() + r * doubles;
    for (std::size_t i = 0; i < v_dim; ++i) reference.out.push_back(state[2 + i] / state[1]);
  }
  return reference;
}

}  // namespace treeattn::tools
