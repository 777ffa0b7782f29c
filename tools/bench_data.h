// SPDX-License-Identifier: Apache-2.0
// Random q, K and V of one shape. What a token holds follows from the seed, the sequence and the token alone, so that
// any number of ranks can each make its own part of one and the same sequence.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "options.h"
#include "treeattn/attention.h"

namespace treeattn::tools {

// Rows of single tokens, in one type. Thread-safe.
class TokenMaker {
 public:
  enum class Part : std::uint8_t { kKeys, kValues, kQueries };

  TokenMaker(DType dtype, std::int64_t heads, std::int64_t head_dim, std::uint64_t seed);

  // One row per head, `stride` bytes apart.
  void make(Part part, std::int64_t sequence, std::int64_t token, std::byte* rows, std::size_t stride) const;

  std::size_t row_bytes() const { return dim_ * size_; }
  std::size_t token_bytes() const { return heads_ * row_bytes(); }

  // Of every row of int8.
  static float int8_scale();

 private:
  std::size_t size_;
  std::size_t heads_;
  std::size_t dim_;
  std::uint64_t seed_;
  std::vector<std::byte> table_;  // the values there are, converted
};

// q of a shape, [batch, queries, heads, head_dim].
base::Buffer make_queries(const Shape& shape, std::uint64_t seed);

// A whole call, in enough copies of K and V that none is found in a cache.
class BenchData {
 public:
  // sets: how many copies of K and V, each with numbers of its own.
  BenchData(const Shape& shape, std::size_t sets, std::uint64_t seed, ThreadPool& pool);

  // The call with copy `set % sets`.
  AttentionInput input(std::size_t set) const;
  std::span<float> out();

  // The memory that input() points into, page tables and lengths apart: K, V, their scales, q. For a copy elsewhere.
  std::vector<std::span<const std::byte>> memory() const;

  // What a BenchData of this shape allocates.
  static std::size_t bytes(const Shape& shape, std::size_t sets);

 private:
  // Paged: those of a sequence, the last one filled up; all of them lie in random order.
  static std::int64_t pages_of(const Shape& shape, std::int64_t sequence);
  static std::int64_t all_pages(const Shape& shape);
  void make_table(std::uint64_t seed);
  std::size_t offset_of(std::int64_t sequence, std::int64_t token, const TokenMaker& maker) const;
  // Bytes from one set to the next.
  static std::size_t set_bytes(const Shape& shape);
  static std::size_t set_rows(const Shape& shape);

  void fill(const TokenMaker& maker, TokenMaker::Part part, base::Buffer& rows, base::Buffer& scales, ThreadPool& pool);
  KvView view(const base::Buffer& rows, const base::Buffer& scales, std::size_t set) const;

  Shape shape_;
  std::size_t sets_;
  base::Buffer q_, out_;
  base::Buffer k_, v_;                 // [sets, one layout of shape_]
  base::Buffer k_scales_, v_scales_;   // [sets, rows], int8 only
  std::int64_t columns_ = 0;           // of the table: pages of the longest sequence
  std::vector<std::int32_t> table_;    // [batch, columns_], paged only
  std::vector<std::int64_t> lengths_;  // [batch], paged only
};

// How many copies keep the caches cold: 1 when K and V are several times larger than the last cache.
std::size_t cold_sets(const Shape& shape, std::size_t last_cache_bytes);

}  // namespace treeattn::tools
