// SPDX-License-Identifier: Apache-2.0
// What a kernel is told of an attention call: plain numbers and device pointers, passed by value.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "treeattn/dtype.h"
#include "treeattn/order.h"

namespace treeattn::kernels::cuda {

// K or V on the device; the same meaning as KvView.
struct DeviceKv {
  const std::byte* data = nullptr;
  const float* scales = nullptr;
  const std::int32_t* page_table = nullptr;
  std::int64_t batch_stride = 0, token_stride = 0, head_stride = 0, page_stride = 0;
  std::int64_t scale_batch_stride = 0, scale_token_stride = 0, scale_head_stride = 0, scale_page_stride = 0;
  std::int64_t pages_per_sequence = 0;
  std::int64_t page_tokens = 0;  // 0: unpaged
  int dim = 0;
  DType dtype = DType::kFloat32;
};

// Inside the kernels the state of a row is [o, m, l, two unused floats]: o can then be moved four floats at a time.
constexpr int row_state_floats(int v_dim) { return v_dim + 4; }

// A description for the copy engine, opaque: CUtensorMap.
struct alignas(128) TensorMap {
  std::uint64_t words[16] = {};
};

// One block's work: some rows of one KV head of one sequence, over the leaves of one node of the tree. Or of several
// neighbouring KV heads, kv_head being the first of them.
struct WorkItem {
  std::int32_t batch = 0;
  std::int32_t kv_head = 0;
  std::int32_t query0 = 0;
  std::int32_t queries = 0;
  std::int32_t head0 = 0;  // query heads, counted from the first of the KV head's group
  std::int32_t heads = 0;
  std::int32_t first_leaf = 0;
  std::int32_t leaves = 0;  // a power of two; the node is [first_leaf, first_leaf + leaves)
  std::int32_t chunks = 0;  // with keys
  std::int32_t node = 0;    // which of the nodes that were asked for; a group of items makes the states of one
  std::int32_t group_items = 1;
  std::int32_t group_slot = 0;  // of the states of the group's first item
  std::int32_t place = 0;       // among the items of its group, in the order of the tree

  // Row order: (query, head).
#ifdef __CUDACC__
  __host__ __device__
#endif
      std::int32_t
      rows() const {
    return queries * heads;
  }
};

// Items that follow from their number alone: a block need not wait for the list. There are up to kRuns runs of them,
// the sequences of each cut alike; in a run heads come first, then parts, then sequences. The numbers of heads (or of
// neighbours that share an item) and of parts are powers of two.
struct ItemGrid {
  struct Run {
    std::int32_t first_item = 0, first_batch = 0;
    std::int32_t part_bits = 0, leaves = 0;
  };
  static constexpr int kRuns = 4;
  std::int32_t count = 0;  // of runs; 0: the items are no such
  std::int32_t head_bits = 0, head_step = 1;
  std::int32_t queries = 0, heads = 0, first_leaf = 0;
  Run runs[kRuns];

#ifdef __CUDACC__
  __host__ __device__
#endif
      WorkItem
      item(std::int32_t number) const {
    Run run = runs[0];
    for (int i = 1; i < kRuns; ++i) {
      if (i < count && number >= runs[i].first_item) run = runs[i];
    }
    number -= run.first_item;
    const std::int32_t sequence = number >> (head_bits + run.part_bits);  // of the run
    const std::int32_t head = number & ((1 << head_bits) - 1);
    WorkItem out;
    out.kv_head = head * head_step;
    out.place = number >> head_bits & ((1 << run.part_bits) - 1);
    out.batch = run.first_batch + sequence;
    out.queries = queries;
    out.heads = heads;
    out.first_leaf = first_leaf + out.place * run.leaves;
    out.leaves = run.leaves;
    out.group_items = 1 << run.part_bits;
    out.group_slot = run.first_item + ((sequence << head_bits | head) << run.part_bits);
    return out;
  }
};

// Items of the largest kind that a kernel can hold.
struct ItemLimits {
  int rows = 16;
  int levels = 4;    // log2 of the most leaves with keys
  int kv_heads = 1;  // neighbours, with all of their query heads
};

// Columns of the tensor-core kernels that serve a head dim, the smallest that hold it: the rest of a row is zeros.
// 0: there are none.
constexpr int kernel_columns(int dim) {
  for (const int columns : {64, 80, 96, 128, 256}) {
    if (dim <= columns) return columns;
  }
  return 0;
}

// Prefill: rows of an item, the queries of one head.
inline constexpr int kPrefillRows = 128;
// Floats of the waiting states of an item's rows, m and l included.
constexpr int waiting_floats(int columns) { return kPrefillRows * (columns + 8); }

// Most states that the last block of a group merges at once.
inline constexpr int kMergeAtOnce = 32;

struct AttentionParams {
  const std::byte* q = nullptr;
  std::int64_t q_batch_stride = 0, q_query_stride = 0, q_head_stride = 0;
  DType q_dtype = DType::kFloat32;
  DeviceKv k, v;
  TensorMap k_map, v_map;
  TensorMap q_map;                            // prefill only
  bool tensor_copies = false;                 // k_map and v_map can be used
  const std::int64_t* lengths = nullptr;      // [batch]
  const std::int64_t* first_query = nullptr;  // [batch] position of query 0
  std::int64_t first_key = 0;
  std::int64_t most_tokens = 0;  // of any sequence
  int batch = 0;
  int queries = 0;
  int heads = 0;
  int kv_heads = 0;
  int heads_per_kv = 0;
  float scale = 0;
  float softcap = 0;
  const float* alibi_slopes = nullptr;  // [heads] or null
  const float* sinks = nullptr;         // [heads] or null; used only where out is
  bool causal = false;
  std::int64_t window = 0;
  ReductionOrder order;
  int leaf_chunks = 0;  // contiguous placement: chunks of a leaf, 2^24 at most; 0: cyclic

  const WorkItem* items = nullptr;
  int item_count = 0;
  ItemGrid grid;  // the items once more, where they are such
  // And the pieces that an item asks for first lie where its first leaf begins, and they and q are there before the
  // kernel begins.
  bool first_known = false;
  bool q_first = false;          // then: q before those pieces, as there are no others; else the first of them before q
  int rows_per_item = 0;         // rows of the largest item; the stride of item_states
  float* item_states = nullptr;  // [items, rows_per_item, row_state_floats]
  unsigned* arrived = nullptr;   // [items] zero between calls; a group's are those of its slots
  // Prefill only, whose blocks take one item after the other.
  float* waiting = nullptr;  // [blocks, waiting_levels, waiting_floats] states that wait for others
  int waiting_levels = 0;
  unsigned* bad_rows = nullptr;  // [items, kPrefillRows / 8] bit 4 r: row r of these eight came out not finite
  // One of the two: the states of every node asked for, or the finished result of the whole tree.
  float* states = nullptr;               // [nodes, batch, queries, heads, v_dim + 2]
  std::int64_t rows = 0;                 // batch * queries * heads
  float* out = nullptr;                  // [batch, queries, heads, v_dim]
  std::uint16_t* rounded_out = nullptr;  // the same in bfloat16 as well, or null
  float* lse = nullptr;                  // [batch, queries, heads] or null
};

}  // namespace treeattn::kernels::cuda
