// SPDX-License-Identifier: Apache-2.0
// A checked attention call with every default filled in: what the backends work on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "plan/node_set.h"
#include "plan/tree_order.h"
#include "treeattn/attention.h"

namespace treeattn::kernels {

// Whether a type of K and V goes with a float32 scale for every row of a head: always int8, fp8 where it is wanted.
constexpr bool has_scales(DType type) { return type == DType::kInt8 || type == DType::kFp8E4M3; }

// Half-open range of local key indices.
struct KeyRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  bool empty() const { return begin >= end; }
};

struct Problem {
  QueryView q;
  KvView k;
  KvView v;
  std::vector<std::int64_t> lengths;      // [batch]
  std::vector<std::int64_t> first_query;  // [batch] global position of query 0
  std::int64_t first_key = 0;             // global position of key 0
  float scale = 0.0f;
  bool causal = false;
  std::int64_t window = 0;
  float softcap = 0.0f;
  std::span<const float> alibi_slopes;
  std::span<const float> sinks;
  ReductionOrder order;
  plan::NodeSet nodes;  // the part of the tree to compute: one state per row and node

  std::int64_t group() const { return q.heads / k.kv_heads; }  // query heads per KV head
  std::int64_t rows() const { return q.batch * q.queries * q.heads; }
  bool whole_tree() const { return nodes.size() == 1 && (1 << nodes[0].level) == order.branches; }

  // The keys that query `query` of sequence `batch` may see, after length, causal and window: always one range.
  KeyRange visible(std::int64_t batch, std::int64_t query) const;
  // From the first to the last key that one of these queries sees.
  KeyRange visible_to_any(std::int64_t batch, std::int64_t first, std::int64_t count) const;
  // Of all queries of a sequence.
  KeyRange visible_to_any(std::int64_t batch) const { return visible_to_any(batch, 0, q.queries); }
};

// Checks everything that can be checked without touching K, V or q (page tables are read), fills in the defaults.
// Throws InvalidArgument naming the value and what is accepted. nodes: the part of the tree to compute, null for all of
// it; only keys of its leaves are read, and pages of others need not exist.
Problem make_problem(const AttentionInput& in, const AttentionOptions& options, const plan::NodeSet* nodes = nullptr);

// The first of its checks: the sizes of the views, each and against the others. It makes nothing, so that a caller who
// has memory for the result can compare that with the sizes before lengths are made for a batch that cannot be meant.
void check_sizes(const AttentionInput& in);

// What can be said of one view's memory without its lengths: where there are rows and scales they are aligned, strides
// are 1 or more, and no row lies beyond the last address. Throws InvalidArgument.
void check_kv_layout(std::string_view name, const KvView& view);

// Address of row (batch, token, head) of a view: head_dim elements.
const std::byte* kv_row(const KvView& view, std::int64_t batch, std::int64_t token, std::int64_t head);
// Address of its scale. Requires view.scales.
const float* kv_scale_address(const KvView& view, std::int64_t batch, std::int64_t token, std::int64_t head);
// Its scale: 1 where the view has none.
float kv_scale(const KvView& view, std::int64_t batch, std::int64_t token, std::int64_t head);
// Address of query row (batch, query, head).
const std::byte* query_row(const QueryView& view, std::int64_t batch, std::int64_t query, std::int64_t head);

}  // namespace treeattn::kernels
