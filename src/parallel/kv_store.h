// SPDX-License-Identifier: Apache-2.0
// One rank's part of a sharded KV cache: what KvCache is made of, and what the attention calls read.
//
// A page holds one chunk of one sequence (in every layer at the same place), so growth never copies and a branch moves
// page by page.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "plan/shares.h"
#include "treeattn/kv_cache.h"
#include "treeattn/views.h"

namespace treeattn::parallel {

// K and V of some sequences on this rank, ready for the kernels: paged views whose page is a chunk and whose table has
// an entry for every chunk of the sequence, -1 where another rank carries it. Owns the table; views memory of the
// cache, and is valid until the cache is next changed.
struct KvBatch {
  KvView k;
  KvView v;
  std::vector<std::int64_t> lengths;  // [batch] tokens of the whole sequence
  std::vector<std::int32_t> table;    // [batch, chunks of the longest]
};

// The rows of one chunk of one layer on this rank.
struct ChunkMemory {
  std::byte* k = nullptr;     // [tokens, kv_heads, k_dim], contiguous
  std::byte* v = nullptr;     // [tokens, kv_heads, v_dim], contiguous
  float* k_scales = nullptr;  // [tokens, kv_heads], null where the type has none
  float* v_scales = nullptr;
  std::int64_t tokens = 0;  // in use
};

// Bytes of the rows of one token in one layer, all heads.
struct TokenBytes {
  std::size_t k = 0;
  std::size_t v = 0;
  std::size_t k_scales = 0;
  std::size_t v_scales = 0;
  std::size_t all() const { return k + v + k_scales + v_scales; }
};
TokenBytes token_bytes(const KvCacheConfig& config);

}  // namespace treeattn::parallel
