// SPDX-License-Identifier: Apache-2.0
// A KV cache as plain vectors, and a source of random K and V in every type and layout: what the sharded cache is held
// against.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "base/half.h"
#include "kernels/problem.h"
#include "parallel/kv_store.h"
#include "plan/tree_order.h"
#include "temporary_directory.h"
#include "treeattn/kv_cache.h"

namespace treeattn::testing_kv {

// Equal seeds on all ranks: the same calls on all of them.
class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  std::int64_t integer(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(engine_);
  }
  bool chance(double probability) { return std::bernoulli_distribution(probability)(engine_); }
  // Uniform in [-4, 4), of 24 random bits: a normal distribution took most of the time of these tests.
  float value() { return static_cast<float>(static_cast<std::int64_t>(engine_()) >> 40) * 0x1p-21f; }
  template <class T>
  const T& pick(const std::vector<T>& from) {
    return from[static_cast<std::size_t>(integer(0, static_cast<std::int64_t>(from.size()) - 1))];
  }

 private:
  std::mt19937_64 engine_;
};

// TREEATTN_SEED, or a fresh one, which is printed.
inline std::uint64_t test_seed() {
  const char* text = std::getenv("TREEATTN_SEED");
  const std::uint64_t seed = text != nullptr ? std::strtoull(text, nullptr, 10) : std::random_device{}();
  std::printf("TREEATTN_SEED=%llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

// Rows [tokens, kv_heads, dim] of one type, and their scales [tokens, kv_heads] where it has them.
struct Rows {
  DType type = DType::kFloat32;
  std::int64_t heads = 0;
  std::int64_t dim = 0;
  std::vector<std::byte> bytes;
  std::vector<float> scales;

  std::size_t row_bytes() const { return static_cast<std::size_t>(dim) * dtype_size(type); }
  std::size_t token_bytes() const { return row_bytes() * static_cast<std::size_t>(heads); }
  std::int64_t tokens() const { return static_cast<std::int64_t>(bytes.size() / token_bytes()); }
  void resize(std::int64_t count) {
    bytes.resize(token_bytes() * static_cast<std::size_t>(count));
    scales.resize(kernels::has_scales(type) ? static_cast<std::size_t>(heads * count) : 0);
  }
};

inline Rows random_rows(Random& random, DType type, std::int64_t tokens, std::int64_t heads, std::int64_t dim) {
  Rows rows{type, heads, dim, {}, {}};
  rows.resize(tokens);
  const std::size_t size = dtype_size(type);
  for (std::size_t i = 0; i < rows.bytes.size(); i += size) {
    const float value = type == DType::kInt8 ? 40.0f * random.value() : random.value();
    base::store_from_float(&rows.bytes[i], value, type);
  }
  for (float& scale : rows.scales) scale = std::fabs(random.value()) + 0.01f;
  return rows;
}

// What a cache of `type` makes of a row, by the words of treeattn/kv_cache.h.
inline void convert_row(const Rows& from, std::size_t row, Rows& to, std::size_t to_row) {
  const auto dim = static_cast<std::size_t>(from.dim);
  std::byte* out = &to.bytes[to_row * to.row_bytes()];
  if (from.type == to.type) {
    std::memcpy(out, &from.bytes[row * from.row_bytes()], from.row_bytes());
    if (!to.scales.empty()) to.scales[to_row] = from.scales.empty() ? 1.0f : from.scales[row];
    return;
  }
  std::vector<float> values(dim);
  base::load_row_as_float(&from.bytes[row * from.row_bytes()], from.type, from.dim, values.data());
  float scale = 1.0f;
  if (!to.scales.empty()) {
    float largest = 0.0f;
    for (const float value : values) largest = std::max(largest, std::fabs(value));
    if (largest > 0.0f) scale = largest / (to.type == DType::kInt8 ? 127.0f : 448.0f);
    to.scales[to_row] = scale;
  }
  for (std::size_t i = 0; i < dim; ++i) {
    base::store_from_float(out + i * dtype_size(to.type), values[i] / scale, to.type);
  }
}

// The rows laid out in one of several ways, with the view of them.
class Source {
 public:
  Source(Random& random, const Rows& rows) {
    const std::int64_t tokens = rows.tokens();
    const auto heads = rows.heads, dim = rows.dim;
    const bool scales = !rows.scales.empty();
    view_.dtype = rows.type;
    view_.batch = 1;
    view_.tokens = tokens;
    view_.kv_heads = heads;
    view_.head_dim = dim;
    const std::int64_t gap = random.integer(0, 3);  // elements between rows
    const bool heads_first = random.chance(0.4);
    const bool paged = !heads_first && random.chance(0.4) && tokens > 0;
    const std::int64_t rows_apart = dim + gap;
    view_.token_stride = heads_first ? rows_apart : heads * rows_apart;
    view_.head_stride = heads_first ? tokens * rows_apart : rows_apart;
    view_.scale_token_stride = heads_first ? 1 : heads;
    view_.scale_head_stride = heads_first ? tokens : 1;
    std::int64_t slots = tokens;
    if (paged) {
      view_.page_tokens = random.integer(1, 40);
      view_.pages_per_sequence = (tokens + view_.page_tokens - 1) / view_.page_tokens;
      view_.pages = view_.pages_per_sequence + 2;
      view_.page_stride = view_.page_tokens * view_.token_stride;
      view_.scale_page_stride = view_.page_tokens * view_.scale_token_stride;
      for (std::int64_t i = 0; i < view_.pages_per_sequence; ++i) {
        table_.push_back(static_cast<std::int32_t>(view_.pages_per_sequence - i));  // backwards, page 0 unused
      }
      slots = view_.pages * view_.page_tokens;
    }
    bytes_.resize(static_cast<std::size_t>(slots * heads * rows_apart) * dtype_size(rows.type), std::byte{0x7f});
    scales_.resize(scales ? static_cast<std::size_t>(slots * heads) : 0, -1.0f);
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t h = 0; h < heads; ++h) {
        const auto row = static_cast<std::size_t>(t * heads + h);
        std::int64_t at = h * view_.head_stride, scale_at = h * view_.scale_head_stride;
        if (paged) {
          const std::int64_t page = table_[static_cast<std::size_t>(t / view_.page_tokens)];
          at += page * view_.page_stride + t % view_.page_tokens * view_.token_stride;
          scale_at += page * view_.scale_page_stride + t % view_.page_tokens * view_.scale_token_stride;
        } else {
          at += t * view_.token_stride;
          scale_at += t * view_.scale_token_stride;
        }
        std::memcpy(&bytes_[static_cast<std::size_t>(at) * dtype_size(rows.type)], &rows.bytes[row * rows.row_bytes()],
                    rows.row_bytes());
        if (scales) scales_[static_cast<std::size_t>(scale_at)] = rows.scales[row];
      }
    }
  }
  Source(const Source&) = delete;
  KvView view() const {
    KvView view = view_;
    view.data = bytes_.data();
    view.scales = scales_.empty() ? nullptr : scales_.data();
    view.page_table = table_.data();
    return view;
  }
  const std::vector<std::byte>& bytes() const { return bytes_; }
  const std::vector<float>& scales() const { return scales_; }

 private:
  KvView view_;
  std::vector<std::byte> bytes_;
  std::vector<float> scales_;
  std::vector<std::int32_t> table_;
};

class Mirror {
 public:
  explicit Mirror(const KvCacheConfig& config) : config_(config) {}

  void add(SequenceId id) { sequences_[id] = std::vector<Layer>(layers(), empty_layer()); }
  void fork(SequenceId from, SequenceId to) { sequences_[to] = sequences_.at(from); }
  void drop(SequenceId id) { sequences_.erase(id); }
  void resize(SequenceId id, std::int64_t tokens) {
    for (Layer& layer : sequences_.at(id)) {
      layer.k.resize(tokens);
      layer.v.resize(tokens);
    }
  }
  void write(SequenceId id, int layer, std::int64_t first, const Rows& k, const Rows& v) {
    Layer& to = sequences_.at(id)[static_cast<std::size_t>(layer)];
    for (const auto& [from, into] : {std::pair(&k, &to.k), std::pair(&v, &to.v)}) {
      const auto offset = static_cast<std::size_t>(first * config_.kv_heads);
      for (std::size_t row = 0; row < static_cast<std::size_t>(from->tokens() * from->heads); ++row) {
        convert_row(*from, row, *into, offset + row);
      }
    }
  }
  std::int64_t length(SequenceId id) const { return sequences_.at(id)[0].k.tokens(); }
  std::vector<SequenceId> ids() const {
    std::vector<SequenceId> ids;
    for (const auto& [id, layers] : sequences_) ids.push_back(id);
    return ids;
  }

  // Everything this rank carries is as it should be, and it carries what the shares say.
  void expect_equal(const KvCache& cache) const {
    ASSERT_EQ(cache.sequences(), ids());
    const parallel::KvStore& store = cache.store();
    const std::int64_t chunk_tokens = config_.order.chunk_tokens;
    const int rank = cache.communicator()->rank();
    for (const SequenceId id : ids()) {
      ASSERT_EQ(cache.length(id), length(id));
      std::vector<TokenRange> carried;
      for (std::int64_t first = 0, chunk = 0; first < length(id); first += chunk_tokens, ++chunk) {
        if (store.shares().rank_of(plan::leaf_of_chunk(config_.order, chunk)) != rank) continue;
        const std::int64_t tokens = std::min(chunk_tokens, length(id) - first);
        parallel::append_range(carried, id, first, tokens);
        for (int layer = 0; layer < config_.layers; ++layer) {
          const parallel::ChunkMemory memory = store.chunk(layer, id, chunk);
          ASSERT_EQ(memory.tokens, tokens);
          const Layer& want = sequences_.at(id)[static_cast<std::size_t>(layer)];
          parallel::KvMemory& where = store.pool().backend();
          expect_rows(where, want.k, first, tokens, memory.k, memory.k_scales);
          expect_rows(where, want.v, first, tokens, memory.v, memory.v_scales);
        }
      }
      EXPECT_EQ(cache.carried(id, 0, length(id)), carried);
    }
  }
  // Rows of a layer, to write again what was lost.
  Rows k(SequenceId id, int layer, std::int64_t first, std::int64_t count) const {
    return part(sequences_.at(id)[static_cast<std::size_t>(layer)].k, first, count);
  }
  Rows v(SequenceId id, int layer, std::int64_t first, std::int64_t count) const {
    return part(sequences_.at(id)[static_cast<std::size_t>(layer)].v, first, count);
  }

 private:
  struct Layer {
    Rows k;
    Rows v;
  };
  std::size_t layers() const { return static_cast<std::size_t>(config_.layers); }
  Layer empty_layer() const {
    return {{config_.k_type, config_.kv_heads, config_.k_dim, {}, {}},
            {config_.v_type, config_.kv_heads, config_.v_dim, {}, {}}};
  }
  static Rows part(const Rows& rows, std::int64_t first, std::int64_t count) {
    Rows result{rows.type, rows.heads, rows.dim, {}, {}};
    result.resize(count);
    std::memcpy(result.bytes.data(), &rows.bytes[static_cast<std::size_t>(first) * rows.token_bytes()],
                result.bytes.size());
    if (!rows.scales.empty()) {
      std::copy_n(rows.scales.begin() + first * rows.heads, result.scales.size(), result.scales.begin());
    }
    return result;
  }
  static void expect_rows(parallel::KvMemory& where, const Rows& want, std::int64_t first, std::int64_t count,
                          const std::byte* rows, const float* scales) {
    ASSERT_EQ(scales == nullptr, want.scales.empty());
    Rows got{want.type, want.heads, want.dim, {}, {}};
    got.resize(count);
    where.copy_out(got.bytes.data(), rows, got.bytes.size());
    if (scales != nullptr) {
      where.copy_out(reinterpret_cast<std::byte*>(got.scales.data()), reinterpret_cast<const std::byte*>(scales),
                     got.scales.size() * sizeof(float));
    }
    where.finish();
    const Rows expected = part(want, first, count);
    ASSERT_EQ(got.bytes, expected.bytes) << "tokens " << first << " to " << first + count;
    if (scales == nullptr) return;
    ASSERT_EQ(std::memcmp(got.scales.data(), expected.scales.data(), got.scales.size() * sizeof(float)), 0);
  }

  KvCacheConfig config_;
  std::map<SequenceId, std::vector<Layer>> sequences_;
};

// A cache and its mirror, and calls on both.
class Pair {
 public:
  Pair(std::shared_ptr<Communicator> world, const KvCacheConfig& config, std::span<const double> weights = {},
       int gpu = KvCache::kHost)
      : cache(std::move(world), config, weights, gpu), mirror(config) {}
  virtual ~Pair() = default;
  Pair(Pair&&) = default;

  SequenceId add() {
    const SequenceId id = cache.add_sequence();
    mirror.add(id);
    return id;
  }
  SequenceId fork(SequenceId from) {
    const SequenceId id = cache.fork(from);
    mirror.fork(from, id);
    return id;
  }
  void truncate(SequenceId id, std::int64_t length) {
    cache.truncate(id, length);
    mirror.resize(id, length);
  }
  void drop(SequenceId id) {
    cache.drop(id);
    mirror.drop(id);
  }
  // By append where there is one layer, else by extend and write.
  void grow(Random& random, SequenceId id, std::int64_t tokens) {
    const std::int64_t before = cache.length(id);
    mirror.resize(id, before + tokens);
    const bool whole = cache.config().layers == 1 && random.chance(0.7);
    if (!whole) cache.extend(id, tokens);
    for (int layer = 0; layer < cache.config().layers; ++layer) write(random, id, layer, before, tokens, whole);
  }
  void write(Random& random, SequenceId id, int layer, std::int64_t first, std::int64_t tokens, bool append = false) {
    const KvCacheConfig& config = cache.config();
    const auto rows = [&](DType type, std::int64_t dim) {
      const std::vector<DType> types = {type, type, DType::kFloat32, DType::kFloat16, DType::kBFloat16};
      return random_rows(random, random.pick(types), tokens, config.kv_heads, dim);
    };
    const Rows k = rows(config.k_type, config.k_dim);
    const Rows v = rows(config.v_type, config.v_dim);
    const Source k_source(random, k), v_source(random, v);
    store(id, layer, first, k_source, v_source, append);
    mirror.write(id, layer, first, k, v);
  }
  // How rows get into the cache.
  virtual void store(SequenceId id, int layer, std::int64_t first, const Source& k, const Source& v, bool append) {
    if (append) {
      cache.append(id, k.view(), v.view());
    } else {
      cache.write(id, layer, first, k.view(), v.view());
    }
  }
  // Writes again what adopt() says is missing.
  void refill(Random& random, std::span<const TokenRange> ranges) {
    for (const TokenRange& range : ranges) {
      for (int layer = 0; layer < cache.config().layers; ++layer) {
        const Source k(random, mirror.k(range.sequence, layer, range.first, range.count));
        const Source v(random, mirror.v(range.sequence, layer, range.first, range.count));
        store(range.sequence, layer, range.first, k, v, false);
      }
    }
  }
  void check() const { mirror.expect_equal(cache); }

  // A random call that needs no other rank.
  void step(Random& random, std::int64_t longest) {
    const std::vector<SequenceId> ids = mirror.ids();
    const std::int64_t what = ids.empty() ? 0 : random.integer(0, 9);
    if (what == 0 && ids.size() < 6) {
      grow(random, add(), random.integer(0, longest));
    } else if (what <= 4) {
      grow(random, random.pick(ids), random.chance(0.3) ? 1 : random.integer(0, longest / 2));
    } else if (what == 5 && ids.size() < 6) {
      fork(random.pick(ids));
    } else if (what == 6) {
      const SequenceId id = random.pick(ids);
      truncate(id, random.integer(cache.length(id) / 2, cache.length(id)));
    } else if (what == 7 && ids.size() > 1) {
      drop(random.pick(ids));
    } else {  // over what is there
      const SequenceId id = random.pick(ids);
      const std::int64_t first = random.integer(0, cache.length(id));
      const std::int64_t tokens = random.integer(0, cache.length(id) - first);
      write(random, id, static_cast<int>(random.integer(0, cache.config().layers - 1)), first, tokens);
    }
  }

  KvCache cache;
  Mirror mirror;
};

inline KvCacheConfig random_config(Random& random) {
  const std::vector<DType> types(std::begin(kAllDTypes), std::end(kAllDTypes));
  KvCacheConfig config;
  config.layers = static_cast<int>(random.integer(1, 3));
  config.kv_heads = random.integer(1, 3);
  config.k_dim = 8 * random.integer(2, 6);
  config.v_dim = 8 * random.integer(2, 6);
  config.k_type = random.pick(types);
  config.v_type = random.pick(types);
  config.order.chunk_tokens = 64;
  config.order.branches = 1 << random.integer(0, 5);
  if (random.chance(0.4)) {
    config.order.placement = Placement::kContiguous;
    config.order.branch_tokens = 64 * random.integer(1, 3);
  }
  return config;
}

}  // namespace treeattn::testing_kv
