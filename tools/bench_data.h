// SPDX-License-Identifier: Apache-2.0
// Random q, K and V of one shape, in enough copies that no call finds its K and V in a cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/buffer.h"
#include "options.h"
#include "treeattn/attention.h"

namespace treeattn::tools {

class BenchData {
 public:
  // sets: how many copies of K and V, each with numbers of its own.
  BenchData(const Shape& shape, std::size_t sets, std::uint64_t seed, ThreadPool& pool);

  // The call with copy `set % sets`.
  AttentionInput input(std::size_t set) const;
  std::span<float> out();

  // What a BenchData of this shape allocates.
  static std::size_t bytes(const Shape& shape, std::size_t sets);

 private:
  // Bytes from one set to the next.
  static std::size_t set_bytes(const Shape& shape);
  static std::size_t set_rows(const Shape& shape);

  void fill_rows(base::Buffer& rows, base::Buffer& scales, std::uint64_t seed, ThreadPool& pool);
  KvView view(const base::Buffer& rows, const base::Buffer& scales, std::size_t set) const;

  Shape shape_;
  std::size_t sets_;
  base::Buffer q_, out_;
  base::Buffer k_, v_;                // [sets, one layout of shape_]
  base::Buffer k_scales_, v_scales_;  // [sets, rows], int8 only
};

// How many copies keep the caches cold: 1 when K and V are several times larger than the last cache.
std::size_t cold_sets(const Shape& shape, std::size_t last_cache_bytes);

}  // namespace treeattn::tools
