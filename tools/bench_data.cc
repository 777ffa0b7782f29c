// SPDX-License-Identifier: Apache-2.0
// Filling gigabytes with plausible numbers in about a second each. A number is the sum of the four bytes of a random
// word, which is roughly normal and takes only 1021 values, so conversion is a table.
#include "bench_data.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "base/half.h"
#include "base/mix.h"
#include "base/round_up.h"

namespace treeattn::tools {
namespace {

constexpr std::int64_t kTokensPerTask = 64;

constexpr std::size_t kValues = 4 * 255 + 1;
constexpr float kUnit = 1.7320508f / 256.0f;  // gives the sum of four bytes a variance of 1
constexpr float kLargest = 510.0f * kUnit;
constexpr std::size_t kMostDim = 256;

// Sixteen xorshift generators side by side, so that the compiler makes SIMD of it.
class Noise {
 public:
  explicit Noise(std::uint64_t seed) {
    for (std::uint32_t& state : states_) {
      seed += 0x9e3779b97f4a7c15ull;
      state = static_cast<std::uint32_t>(base::mix(seed) >> 32) | 1;  // any but zero
    }
  }

  // Requires room for n rounded up to a multiple of kLanes. Each is below kValues.
  void fill(std::uint16_t* out, std::size_t n) {
    for (; n > 0; n -= std::min(n, kLanes), out += kLanes) next(out);
  }

  static constexpr std::size_t kLanes = 16;

 private:
  void next(std::uint16_t* out) {
    for (std::size_t i = 0; i < kLanes; ++i) {
      std::uint32_t x = states_[i];
      x ^= x << 13;
      x ^= x >> 17;
      x ^= x << 5;
      states_[i] = x;
      out[i] = static_cast<std::uint16_t>((x & 0xff) + ((x >> 8) & 0xff) + ((x >> 16) & 0xff) + (x >> 24));
    }
  }

  std::uint32_t states_[kLanes];
};

// One width each, so that a copy is one instruction.
template <std::size_t kSize>
void copy_values(const std::uint16_t* index, std::size_t n, const std::byte* table, std::byte* out) {
  for (std::size_t i = 0; i < n; ++i) std::memcpy(out + i * kSize, table + index[i] * kSize, kSize);
}

}  // namespace

TokenMaker::TokenMaker(DType dtype, std::int64_t heads, std::int64_t head_dim, std::uint64_t seed)
    : size_(dtype_size(dtype)),
      heads_(static_cast<std::size_t>(heads)),
      dim_(static_cast<std::size_t>(head_dim)),
      seed_(seed),
      table_(kValues * size_) {
  const float scale = dtype == DType::kInt8 ? int8_scale() : 1.0f;
  for (std::size_t i = 0; i < kValues; ++i) {
    const float value = (static_cast<float>(i) - 510.0f) * kUnit;
    base::store_from_float(table_.data() + i * size_, value / scale, dtype);
  }
}

float TokenMaker::int8_scale() { return kLargest / 127.0f; }

void TokenMaker::make(Part part, std::int64_t sequence, std::int64_t token, std::byte* rows, std::size_t stride) const {
  std::uint64_t seed = base::mix(4 * seed_ + static_cast<std::uint64_t>(part) + 1);
  seed = base::mix(seed + static_cast<std::uint64_t>(sequence));
  Noise noise(base::mix(seed + static_cast<std::uint64_t>(token)));
  std::uint16_t index[kMostDim + Noise::kLanes];
  for (std::size_t h = 0; h < heads_; ++h, rows += stride) {
    noise.fill(index, dim_);
    if (size_ == 1) copy_values<1>(index, dim_, table_.data(), rows);
    if (size_ == 2) copy_values<2>(index, dim_, table_.data(), rows);
    if (size_ == 4) copy_values<4>(index, dim_, table_.data(), rows);
  }
}

base::Buffer make_queries(const Shape& shape, std::uint64_t seed) {
  const TokenMaker maker(shape.q_dtype, shape.heads, shape.head_dim, seed);
  base::Buffer q(shape.q_bytes());
  std::byte* at = q.as<std::byte>();
  for (std::int64_t b = 0; b < shape.batch; ++b) {
    for (std::int64_t i = 0; i < shape.queries; ++i, at += maker.token_bytes()) {
      maker.make(TokenMaker::Part::kQueries, b, i, at, maker.row_bytes());
    }
  }
  return q;
}

std::size_t cold_sets(const Shape& shape, std::size_t last_cache_bytes) {
  constexpr std::size_t kEnough = std::size_t{512} << 20;
  const std::size_t bytes = shape.kv_bytes();
  if (bytes >= 4 * last_cache_bytes) return 1;
  const std::size_t total = std::max(kEnough, 4 * last_cache_bytes);
  return base::divide_up(total, bytes);
}

std::int64_t BenchData::pages_of(const Shape& shape, std::int64_t sequence) {
  return base::divide_up(shape.length(sequence), shape.page_tokens);
}

std::int64_t BenchData::all_pages(const Shape& shape) {
  std::int64_t pages = 0;
  for (std::int64_t b = 0; b < shape.batch; ++b) pages += pages_of(shape, b);
  return pages;
}

std::size_t BenchData::set_rows(const Shape& shape) {
  const std::int64_t tokens = shape.page_tokens > 0 ? all_pages(shape) * shape.page_tokens : shape.batch * shape.tokens;
  return static_cast<std::size_t>(tokens * shape.kv_heads);
}

std::size_t BenchData::set_bytes(const Shape& shape) {
  const std::size_t row_bytes = static_cast<std::size_t>(shape.head_dim) * dtype_size(shape.dtype);
  return base::round_up(set_rows(shape) * row_bytes, base::Buffer::kLine);
}

std::size_t BenchData::bytes(const Shape& shape, std::size_t sets) {
  const std::size_t scales = shape.dtype == DType::kInt8 ? set_rows(shape) * sizeof(float) : 0;
  std::size_t kv = 0, all = 0;
  // Few tokens in large pages: many copies, and every one of them has whole pages.
  const bool countless = __builtin_mul_overflow(2 * sets, set_bytes(shape) + scales, &kv) ||
                         __builtin_add_overflow(kv, shape.q_bytes() + shape.out_bytes(), &all);
  return countless ? std::numeric_limits<std::size_t>::max() : all;
}

BenchData::BenchData(const Shape& shape, std::size_t sets, std::uint64_t seed, ThreadPool& pool)
    : shape_(shape),
      sets_(sets),
      q_(make_queries(shape, seed)),
      out_(shape.out_bytes()),
      k_(sets * set_bytes(shape)),
      v_(sets * set_bytes(shape)) {
  if (shape.dtype == DType::kInt8) {
    k_scales_ = base::Buffer(sets * set_rows(shape) * sizeof(float));
    v_scales_ = base::Buffer(sets * set_rows(shape) * sizeof(float));
  }
  if (shape.page_tokens > 0) make_table(seed);
  const TokenMaker maker(shape.dtype, shape.kv_heads, shape.head_dim, seed);
  fill(maker, TokenMaker::Part::kKeys, k_, k_scales_, pool);
  fill(maker, TokenMaker::Part::kValues, v_, v_scales_, pool);
  std::fill_n(out_.as<float>(), out_.bytes() / sizeof(float), 0.0f);
}

void BenchData::make_table(std::uint64_t seed) {
  std::vector<std::int32_t> pages(static_cast<std::size_t>(all_pages(shape_)));
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), std::mt19937_64(seed));
  for (std::int64_t b = 0; b < shape_.batch; ++b) {
    lengths_.push_back(shape_.length(b));
    columns_ = std::max(columns_, pages_of(shape_, b));
  }
  table_.assign(static_cast<std::size_t>(shape_.batch * columns_), -1);
  auto next = pages.begin();
  for (std::int64_t b = 0; b < shape_.batch; ++b) {
    const std::int64_t count = pages_of(shape_, b);
    std::copy_n(next, count, table_.begin() + b * columns_);
    next += count;
  }
}

std::size_t BenchData::offset_of(std::int64_t sequence, std::int64_t token, const TokenMaker& maker) const {
  if (shape_.page_tokens > 0) {
    const std::int64_t page = table_[static_cast<std::size_t>(sequence * columns_ + token / shape_.page_tokens)];
    return static_cast<std::size_t>(page * shape_.page_tokens + token % shape_.page_tokens) * maker.token_bytes();
  }
  const bool tokens_first = shape_.layout == Layout::kTokensFirst;
  return static_cast<std::size_t>(sequence * shape_.tokens) * maker.token_bytes() +
         static_cast<std::size_t>(token) * (tokens_first ? maker.token_bytes() : maker.row_bytes());
}

void BenchData::fill(const TokenMaker& maker, TokenMaker::Part part, base::Buffer& rows, base::Buffer& scales,
                     ThreadPool& pool) {
  const bool tokens_first = shape_.layout == Layout::kTokensFirst;
  const std::size_t head_stride =
      tokens_first ? maker.row_bytes() : static_cast<std::size_t>(shape_.tokens) * maker.row_bytes();
  const auto stored = [&](std::int64_t sequence) {
    return shape_.page_tokens > 0 ? pages_of(shape_, sequence) * shape_.page_tokens : shape_.tokens;
  };
  const std::int64_t sequences = static_cast<std::int64_t>(sets_) * shape_.batch;
  const std::int64_t longest = std::max(shape_.tokens, columns_ * shape_.page_tokens);
  const std::int64_t tasks = base::divide_up(longest, kTokensPerTask);
  pool.run(static_cast<std::size_t>(sequences * tasks), [&](std::size_t task, int) {
    const std::int64_t sequence = static_cast<std::int64_t>(task) / tasks;
    const std::int64_t first = static_cast<std::int64_t>(task) % tasks * kTokensPerTask;
    const std::int64_t place = sequence % shape_.batch;
    std::byte* data = rows.as<std::byte>() + static_cast<std::size_t>(sequence / shape_.batch) * set_bytes(shape_);
    for (std::int64_t t = first; t < std::min(stored(place), first + kTokensPerTask); ++t) {
      maker.make(part, sequence, t, data + offset_of(place, t, maker), head_stride);
    }
  });
  std::fill_n(scales.as<float>(), scales.bytes() / sizeof(float), TokenMaker::int8_scale());
}

KvView BenchData::view(const base::Buffer& rows, const base::Buffer& scales, std::size_t set) const {
  const std::byte* data = rows.as<std::byte>() + set % sets_ * set_bytes(shape_);
  KvView out;
  if (shape_.page_tokens > 0) {
    out = KvView::paged(data, shape_.dtype, all_pages(shape_), shape_.page_tokens, shape_.kv_heads, shape_.head_dim,
                        shape_.batch, columns_, table_.data());
  } else {
    const auto make = shape_.layout == Layout::kTokensFirst ? &KvView::tokens_first : &KvView::heads_first;
    out = make(data, shape_.dtype, shape_.batch, shape_.tokens, shape_.kv_heads, shape_.head_dim);
  }
  if (scales.bytes() == 0) return out;
  return out.with_scales(scales.as<float>() + set % sets_ * set_rows(shape_));
}

AttentionInput BenchData::input(std::size_t set) const {
  AttentionInput in;
  in.q =
      QueryView::dense(q_.as<std::byte>(), shape_.q_dtype, shape_.batch, shape_.queries, shape_.heads, shape_.head_dim);
  in.k = view(k_, k_scales_, set);
  in.v = view(v_, v_scales_, set);
  in.lengths = lengths_;
  return in;
}

std::vector<std::span<const std::byte>> BenchData::memory() const {
  std::vector<std::span<const std::byte>> out;
  for (const base::Buffer* buffer : {&k_, &v_, &k_scales_, &v_scales_, &q_}) {
    if (buffer->bytes() > 0) out.emplace_back(buffer->as<std::byte>(), buffer->bytes());
  }
  return out;
}

std::span<float> BenchData::out() { return {out_.as<float>(), out_.bytes() / sizeof(float)}; }

}  // namespace treeattn::tools
