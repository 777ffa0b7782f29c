// SPDX-License-Identifier: Apache-2.0
// Filling gigabytes with plausible numbers in about a second each. A number is the sum of the four bytes of a random
// word, which is roughly normal and takes only 1021 values, so conversion is a table.
#include "bench_data.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/half.h"

namespace treeattn::tools {
namespace {

constexpr std::size_t kRowsPerTask = 1024;

constexpr std::size_t kValues = 4 * 255 + 1;
constexpr float kUnit = 1.7320508f / 256.0f;  // gives the sum of four bytes a variance of 1
constexpr float kLargest = 510.0f * kUnit;

// Sixteen xorshift generators side by side, so that the compiler makes SIMD of it.
class Noise {
 public:
  explicit Noise(std::uint64_t seed) {
    for (std::uint32_t& state : states_) {
      seed = (seed + 1) * 0x9e3779b97f4a7c15ull;
      state = static_cast<std::uint32_t>(seed >> 32) | 1;  // any but zero
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

// Rows of noise in one type.
class RowMaker {
 public:
  RowMaker(DType dtype, std::int64_t dim)
      : size_(dtype_size(dtype)), dim_(static_cast<std::size_t>(dim)), table_(kValues * size_) {
    const float scale = dtype == DType::kInt8 ? kInt8Scale : 1.0f;
    for (std::size_t i = 0; i < kValues; ++i) {
      const float value = (static_cast<float>(i) - 510.0f) * kUnit;
      base::store_from_float(table_.data() + i * size_, value / scale, dtype);
    }
  }

  std::size_t row_bytes() const { return dim_ * size_; }

  void make(Noise& noise, std::byte* out) const {
    std::uint16_t index[kMostDim + Noise::kLanes];
    noise.fill(index, dim_);
    // One width each, so that a copy is one instruction.
    if (size_ == 1) return copy<1>(index, out);
    if (size_ == 2) return copy<2>(index, out);
    return copy<4>(index, out);
  }

  static constexpr float kInt8Scale = kLargest / 127.0f;

 private:
  static constexpr std::size_t kMostDim = 256;

  template <std::size_t kSize>
  void copy(const std::uint16_t* index, std::byte* out) const {
    const std::byte* table = table_.data();
    for (std::size_t i = 0; i < dim_; ++i) std::memcpy(out + i * kSize, table + index[i] * kSize, kSize);
  }

  std::size_t size_;
  std::size_t dim_;
  std::vector<std::byte> table_;
};

std::size_t round_to_line(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

std::size_t cold_sets(const Shape& shape, std::size_t last_cache_bytes) {
  constexpr std::size_t kEnough = std::size_t{512} << 20;
  const std::size_t bytes = shape.kv_bytes();
  if (bytes >= 4 * last_cache_bytes) return 1;
  const std::size_t total = std::max(kEnough, 4 * last_cache_bytes);
  return (total + bytes - 1) / bytes;
}

std::size_t BenchData::set_rows(const Shape& shape) {
  return static_cast<std::size_t>(shape.batch * shape.tokens * shape.kv_heads);
}

std::size_t BenchData::set_bytes(const Shape& shape) {
  return round_to_line(set_rows(shape) * static_cast<std::size_t>(shape.head_dim) * dtype_size(shape.dtype));
}

std::size_t BenchData::bytes(const Shape& shape, std::size_t sets) {
  return sets * (shape.kv_bytes() + 128) + shape.q_bytes() + shape.out_bytes();
}

BenchData::BenchData(const Shape& shape, std::size_t sets, std::uint64_t seed, ThreadPool& pool)
    : shape_(shape),
      sets_(sets),
      q_(shape.q_bytes()),
      out_(shape.out_bytes()),
      k_(sets * set_bytes(shape)),
      v_(sets * set_bytes(shape)) {
  if (shape.dtype == DType::kInt8) {
    k_scales_ = base::Buffer(sets * set_rows(shape) * sizeof(float));
    v_scales_ = base::Buffer(sets * set_rows(shape) * sizeof(float));
  }
  fill_rows(k_, k_scales_, 4 * seed, pool);
  fill_rows(v_, v_scales_, 4 * seed + 1, pool);
  Noise noise(4 * seed + 2);
  const RowMaker queries(shape.q_dtype, shape.head_dim);
  for (std::size_t at = 0; at < q_.bytes(); at += queries.row_bytes()) queries.make(noise, q_.as<std::byte>() + at);
  std::fill_n(out_.as<float>(), out_.bytes() / sizeof(float), 0.0f);
}

void BenchData::fill_rows(base::Buffer& rows, base::Buffer& scales, std::uint64_t seed, ThreadPool& pool) {
  const RowMaker maker(shape_.dtype, shape_.head_dim);
  const std::size_t per_set = set_rows(shape_);
  const std::size_t all = sets_ * per_set;
  pool.run((all + kRowsPerTask - 1) / kRowsPerTask, [&](std::size_t task, int) {
    Noise noise((seed << 32) + task);
    for (std::size_t row = task * kRowsPerTask; row < std::min(all, (task + 1) * kRowsPerTask); ++row) {
      maker.make(noise, rows.as<std::byte>() + row / per_set * set_bytes(shape_) + row % per_set * maker.row_bytes());
      if (scales.bytes() != 0) scales.as<float>()[row] = RowMaker::kInt8Scale;
    }
  });
}

KvView BenchData::view(const base::Buffer& rows, const base::Buffer& scales, std::size_t set) const {
  const std::byte* data = rows.as<std::byte>() + set % sets_ * set_bytes(shape_);
  const auto make = shape_.layout == Layout::kTokensFirst ? &KvView::tokens_first : &KvView::heads_first;
  const KvView out = make(data, shape_.dtype, shape_.batch, shape_.tokens, shape_.kv_heads, shape_.head_dim);
  if (scales.bytes() == 0) return out;
  return out.with_scales(scales.as<float>() + set % sets_ * set_rows(shape_));
}

AttentionInput BenchData::input(std::size_t set) const {
  AttentionInput in;
  in.q =
      QueryView::dense(q_.as<std::byte>(), shape_.q_dtype, shape_.batch, shape_.queries, shape_.heads, shape_.head_dim);
  in.k = view(k_, k_scales_, set);
  in.v = view(v_, v_scales_, set);
  return in;
}

std::span<float> BenchData::out() { return {out_.as<float>(), out_.bytes() / sizeof(float)}; }

}  // namespace treeattn::tools
