// SPDX-License-Identifier: Apache-2.0
// Which keys a warp of the tensor-core kernels works on, one tile after the other, and where their rows lie.
#pragma once

#include "kernels/cuda/device_rows.cuh"

namespace treeattn::kernels::cuda {

inline constexpr int kMmaTile = 16;  // keys worked on together, on the grid of global positions

// The keys of an item, as local indices. 32 bits: the host sends longer sequences to the generic kernel.
struct ItemKeys {
  int begin, end;          // what some row sees
  int all_begin, all_end;  // what every row sees
  int first_key;
  int first_chunk, last_chunk;
  int chunk_tokens;
  int first_leaf, leaves;
};

// Walks the tiles of an item: leaf by leaf, chunk by chunk.
struct TileCursor {
  int leaf = -1;  // of the item
  int chunk = 0;
  int first = 0;           // key, on the grid: may lie before `begin`
  int begin = 0, end = 0;  // keys of the chunk that are seen
  bool done = false;

  __device__ void enter_chunk(const ItemKeys& keys) {
    begin = max(keys.begin, chunk * keys.chunk_tokens - keys.first_key);
    end = min(keys.end, (chunk + 1) * keys.chunk_tokens - keys.first_key);
    first = begin - (keys.first_key + begin) % kMmaTile;
  }
  __device__ void next_leaf(const ItemKeys& keys, const ReductionOrder& order) {
    while (++leaf < keys.leaves) {
      const std::int64_t found = plan::first_chunk(order, keys.first_leaf + leaf, keys.first_chunk);
      if (found > keys.last_chunk) continue;
      chunk = static_cast<int>(found);
      return enter_chunk(keys);
    }
    done = true;
  }
  __device__ void next(const ItemKeys& keys, const ReductionOrder& order) {
    first += kMmaTile;
    if (first < end) return;
    const std::int64_t found = plan::next_chunk(order, keys.first_leaf + leaf, chunk);
    if (found > keys.last_chunk) return next_leaf(keys, order);
    chunk = static_cast<int>(found);
    enter_chunk(keys);
  }
};

// The rows of one head of one sequence, 16-bit elements.
struct RowSource {
  const std::byte* base;
  const std::int32_t* table;  // null: unpaged
  std::int64_t row_bytes, page_bytes;
  unsigned page_tokens;

  __device__ RowSource(const DeviceKv& kv, const WorkItem& item)
      : base(kv.data + 2 * item.kv_head * kv.head_stride),
        table(nullptr),
        row_bytes(2 * kv.token_stride),
        page_bytes(2 * kv.page_stride),
        page_tokens(static_cast<unsigned>(kv.page_tokens)) {
    if (page_tokens == 0) {
      base += 2 * item.batch * kv.batch_stride;
    } else {
      table = kv.page_table + item.batch * kv.pages_per_sequence;
    }
  }
  __device__ const std::byte* row(int token) const {
    if (table == nullptr) return base + token * row_bytes;
    const unsigned page = static_cast<unsigned>(token) / page_tokens;
    const unsigned within = static_cast<unsigned>(token) - page * page_tokens;
    return base + table[page] * page_bytes + within * row_bytes;
  }
};

// The keys that every query of the item sees.
__device__ inline Range visible_to_all(const AttentionParams& p, const WorkItem& item) {
  Range all = visible(p, item.batch, item.query0);
  for (int i = 1; i < item.queries; ++i) {
    const Range one = visible(p, item.batch, item.query0 + i);
    all = {max(all.begin, one.begin), min(all.end, one.end)};
  }
  return all;
}

__device__ inline ItemKeys keys_of(const AttentionParams& p, const WorkItem& item) {
  const Range any = visible_to_any(p, item), all = visible_to_all(p, item);
  ItemKeys keys;
  keys.begin = static_cast<int>(any.begin);
  keys.end = static_cast<int>(any.end);
  keys.all_begin = static_cast<int>(all.begin);
  keys.all_end = static_cast<int>(all.end);
  keys.first_key = static_cast<int>(p.first_key);
  keys.chunk_tokens = static_cast<int>(p.order.chunk_tokens);
  keys.first_chunk = (keys.first_key + keys.begin) / keys.chunk_tokens;
  keys.last_chunk = keys.begin < keys.end ? (keys.first_key + keys.end - 1) / keys.chunk_tokens : -1;
  keys.first_leaf = item.first_leaf;
  keys.leaves = item.leaves;
  return keys;
}

}  // namespace treeattn::kernels::cuda
