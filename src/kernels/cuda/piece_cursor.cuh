// SPDX-License-Identifier: Apache-2.0
// Which keys a warp of the tensor-core kernels works on, one piece after the other, and where their rows lie. All warps
// of a block work on one leaf at a time; the pieces of a chunk go round the warps. Which piece a key is in, and which
// warp takes it, follows from its global position alone.
#pragma once

#include "kernels/cuda/device_rows.cuh"

namespace treeattn::kernels::cuda {

inline constexpr int kMmaWarps = 4;

// a / b; quick where b is a power of two, as it mostly is.
__device__ inline unsigned quotient(unsigned a, unsigned b) {
  return (b & (b - 1)) == 0 ? a >> (31 - __clz(static_cast<int>(b))) : a / b;
}

// The keys of an item, as local indices. 32 bits: the host sends longer sequences to the generic kernel.
struct ItemKeys {
  int begin, end;          // what some row sees
  int all_begin, all_end;  // what every row sees
  int first_key;
  int first_chunk, last_chunk;
  int chunk_tokens;
  int first_leaf, leaves;
  int leaf_step;    // leaves in between have no keys
  int branches;     // cyclic placement
  int leaf_chunks;  // contiguous placement: chunks of a leaf; 0: cyclic
  unsigned brev_shift;

  __device__ ItemKeys(const AttentionParams& p, const SequenceFacts& sequence, const WorkItem& item) {
    const ItemRanges seen(p, sequence, item);
    set(p, item, seen.any, seen.all);
  }
  // The same from the first and the last query alone, for many of them: ranges move on with the query. Some of the
  // keys may be seen by nobody.
  __device__ static ItemKeys of_many(const AttentionParams& p, const WorkItem& item) {
    const Range first = range_of(p, item.batch, item.query0);
    const Range last = range_of(p, item.batch, item.query0 + item.queries - 1);
    const Range any = first.begin < last.end ? Range{first.begin, last.end} : Range{0, 0};
    ItemKeys keys;
    keys.set(p, item, any, {min(last.begin, p.most_tokens), max(first.end, std::int64_t{0})});
    return keys;
  }

 private:
  __device__ ItemKeys() {}
  __device__ void set(const AttentionParams& p, const WorkItem& item, const Range& any, const Range& all) {
    begin = static_cast<int>(any.begin);
    end = static_cast<int>(any.end);
    all_begin = static_cast<int>(all.begin);
    all_end = static_cast<int>(all.end);
    first_key = static_cast<int>(p.first_key);
    chunk_tokens = static_cast<int>(p.order.chunk_tokens);
    first_chunk = static_cast<int>(quotient(first_key + begin, chunk_tokens));
    last_chunk = begin < end ? static_cast<int>(quotient(first_key + end - 1, chunk_tokens)) : -1;
    first_leaf = item.first_leaf;
    leaves = item.leaves;
    branches = p.order.branches;
    brev_shift = static_cast<unsigned>(__clz(branches) + 1);
    leaf_chunks = p.leaf_chunks;
    leaf_step = 1;
    // With fewer chunks than branches, leaves in bit-reversed order are used at even distances.
    if (leaf_chunks == 0 && first_chunk == 0 && 2 * last_chunk < branches) {
      leaf_step = last_chunk <= 0 ? branches : branches >> (32 - __clz(last_chunk));
    }
  }

 public:
  // plan::first_chunk and plan::next_chunk in 32 bits; past last_chunk where there is none.
  __device__ int first_chunk_of(int leaf) const {
    if (leaf_chunks == 0) {
      const unsigned branch = branches == 1 ? 0 : __brev(static_cast<unsigned>(leaf)) >> brev_shift;
      return first_chunk + ((static_cast<int>(branch) - first_chunk) & (branches - 1));
    }
    const std::int64_t start = static_cast<std::int64_t>(leaf) * leaf_chunks;
    const std::int64_t chunk = max(static_cast<std::int64_t>(first_chunk), start);
    return chunk <= last_chunk && (leaf == branches - 1 || chunk < start + leaf_chunks) ? static_cast<int>(chunk)
                                                                                        : last_chunk + 1;
  }
  __device__ int next_chunk_of(int leaf, int chunk) const {
    if (leaf_chunks == 0) return chunk + branches;
    return leaf == branches - 1 || (chunk + 1) % leaf_chunks != 0 ? chunk + 1 : last_chunk + 1;
  }
};

// Where a leaf begins, if it has keys and no mask or offset moves them.
__device__ inline int first_token(const AttentionParams& p, int leaf) {
  int chunk = leaf * p.leaf_chunks;
  if (p.leaf_chunks == 0 && p.order.branches > 1) {
    chunk = static_cast<int>(__brev(static_cast<unsigned>(leaf)) >> (__clz(p.order.branches) + 1));
  }
  return chunk * static_cast<int>(p.order.chunk_tokens);
}

// Walks the leaves of an item that have keys.
struct LeafWalk {
  int leaf = 0;  // of the item
  int chunk = 0;

  __device__ explicit LeafWalk(const ItemKeys& keys) { settle(keys); }
  __device__ void next(const ItemKeys& keys) {
    leaf += keys.leaf_step;
    settle(keys);
  }
  __device__ bool done(const ItemKeys& keys) const { return leaf >= keys.leaves; }

 private:
  __device__ void settle(const ItemKeys& keys) {
#pragma unroll 1
    for (; leaf < keys.leaves; leaf += keys.leaf_step) {
      chunk = keys.first_chunk_of(keys.first_leaf + leaf);
      if (chunk <= keys.last_chunk) return;
    }
  }
};

// Keys [max(first, begin), min(first + kTile, end)) of a leaf.
struct Piece {
  int leaf;  // of the item; -1: there is none
  int first;
  int begin, end;
};

// Walks the pieces of one of those who share them: leaf by leaf, chunk by chunk.
template <int kTile, int kSharers = kMmaWarps>
class PieceWalk {
 public:
  // Stands before the first piece. first_leaf: where the item's walk begins.
  __device__ PieceWalk(const LeafWalk& first_leaf, int warp) : at_(first_leaf), warp_(warp) {}
  __device__ Piece next(const ItemKeys& keys) {
    first_ += kSharers * kTile;
    while (first_ >= end_ && !at_.done(keys)) {
      if (begun_) {
        at_.chunk = keys.next_chunk_of(keys.first_leaf + at_.leaf, at_.chunk);
        if (at_.chunk > keys.last_chunk) at_.next(keys);
        if (at_.done(keys)) break;
      }
      begun_ = true;
      enter_chunk(keys);
    }
    return {at_.done(keys) ? -1 : at_.leaf, first_, begin_, end_};
  }

 private:
  __device__ void enter_chunk(const ItemKeys& keys) {
    const int start = at_.chunk * keys.chunk_tokens - keys.first_key;
    begin_ = max(keys.begin, start);
    end_ = min(keys.end, start + keys.chunk_tokens);
    first_ = start + warp_ * kTile;
    if (begin_ > start) first_ += (begin_ - start) / (kSharers * kTile) * (kSharers * kTile);
    if (first_ + kTile <= begin_) first_ += kSharers * kTile;
  }
  LeafWalk at_;
  int warp_;
  bool begun_ = false;
  int first_ = 0, begin_ = 0, end_ = 0;
};

// The rows of one head of one sequence.
struct RowSource {
  const std::byte* base;
  const std::int32_t* table;  // null: unpaged
  std::int64_t row_bytes, page_bytes;
  unsigned page_tokens;
  int batch;

  __device__ RowSource(const DeviceKv& kv, const WorkItem& item, int size) {
    base = kv.data + size * item.kv_head * kv.head_stride;
    table = nullptr;
    row_bytes = size * kv.token_stride;
    page_bytes = size * kv.page_stride;
    page_tokens = static_cast<unsigned>(kv.page_tokens);
    batch = item.batch;
    if (page_tokens == 0) {
      base += size * item.batch * kv.batch_stride;
    } else {
      table = kv.page_table + item.batch * kv.pages_per_sequence;
    }
  }
  __device__ unsigned page_of(int token) const { return quotient(static_cast<unsigned>(token), page_tokens); }
  __device__ const std::byte* row(int token) const {
    if (table == nullptr) return base + token * row_bytes;
    const unsigned page = page_of(token);
    return base + table[page] * page_bytes + (static_cast<unsigned>(token) - page * page_tokens) * row_bytes;
  }
};

}  // namespace treeattn::kernels::cuda
