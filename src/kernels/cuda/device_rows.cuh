// SPDX-License-Identifier: Apache-2.0
// Addresses, positions and conversions inside a kernel: the device's counterpart of kernels/problem.cc.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "kernels/cuda/params.h"
#include "plan/tree_order.h"

namespace treeattn::kernels::cuda {

__device__ inline int element_size(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : dtype == DType::kFloat16 || dtype == DType::kBFloat16 ? 2 : 1;
}

// Element i of a row, exactly.
__device__ inline float load_element(const std::byte* row, int i, DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return reinterpret_cast<const float*>(row)[i];
    case DType::kFloat16:
      return __half2float(reinterpret_cast<const __half*>(row)[i]);
    case DType::kBFloat16:
      return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(row)[i]);
    case DType::kInt8:
      return static_cast<float>(reinterpret_cast<const signed char*>(row)[i]);
    case DType::kFp8E4M3:
      return static_cast<float>(reinterpret_cast<const __nv_fp8_e4m3*>(row)[i]);
  }
  return 0.0f;
}

// Negative: not here.
__device__ inline std::int64_t page_of(const DeviceKv& kv, int batch, std::int64_t token) {
  return kv.page_table[batch * kv.pages_per_sequence + token / kv.page_tokens];
}

__device__ inline const std::byte* kv_row(const DeviceKv& kv, int batch, std::int64_t token, int head) {
  std::int64_t offset = head * kv.head_stride;
  if (kv.page_tokens == 0) {
    offset += batch * kv.batch_stride + token * kv.token_stride;
  } else {
    offset += page_of(kv, batch, token) * kv.page_stride + token % kv.page_tokens * kv.token_stride;
  }
  return kv.data + offset * element_size(kv.dtype);
}

__device__ inline float kv_scale(const DeviceKv& kv, int batch, std::int64_t token, int head) {
  if (kv.scales == nullptr) return 1.0f;
  std::int64_t offset = head * kv.scale_head_stride;
  if (kv.page_tokens == 0) {
    offset += batch * kv.scale_batch_stride + token * kv.scale_token_stride;
  } else {
    offset += page_of(kv, batch, token) * kv.scale_page_stride + token % kv.page_tokens * kv.scale_token_stride;
  }
  return kv.scales[offset];
}

__device__ inline const std::byte* query_row(const AttentionParams& p, int batch, int query, int head) {
  const std::int64_t offset = batch * p.q_batch_stride + query * p.q_query_stride + head * p.q_head_stride;
  return p.q + offset * element_size(p.q_dtype);
}

// Local key indices, half open.
struct Range {
  std::int64_t begin, end;
};

// The keys that a query sees which stands at local index `own`; always one range. Where it sees none, the end may lie
// anywhere up to the beginning.
__device__ inline Range range_at(const AttentionParams& p, std::int64_t own, std::int64_t length) {
  Range range{0, length};
  if (p.causal) range.end = min(range.end, own + 1);
  if (p.window > 0) {
    range.begin = max(range.begin, own - p.window + 1);
    range.end = min(range.end, own + p.window);
  }
  return range;
}
// What the masks have to know of a sequence.
struct SequenceFacts {
  std::int64_t first_query, length;
  __device__ static SequenceFacts of(const AttentionParams& p, int batch) {
    return {p.first_query[batch], p.lengths[batch]};
  }
};
__device__ inline Range range_of(const AttentionParams& p, const SequenceFacts& sequence, int query) {
  return range_at(p, sequence.first_query + query - p.first_key, sequence.length);
}
__device__ inline Range range_of(const AttentionParams& p, int batch, int query) {
  return range_of(p, SequenceFacts::of(p, batch), query);
}
// The same, {0, 0} where it sees none.
__device__ inline Range visible(const AttentionParams& p, const SequenceFacts& sequence, int query) {
  const Range range = range_of(p, sequence, query);
  if (range.begin >= range.end) return {0, 0};
  return range;
}
__device__ inline Range visible(const AttentionParams& p, int batch, int query) {
  return visible(p, SequenceFacts::of(p, batch), query);
}

// The keys that some query of the item sees, and those that every one sees.
struct ItemRanges {
  Range any, all;
  __device__ ItemRanges(const AttentionParams& p, const SequenceFacts& sequence, const WorkItem& item) {
    any = all = visible(p, sequence, item.query0);
#pragma unroll 1
    for (int i = 1; i < item.queries; ++i) {
      const Range one = visible(p, sequence, item.query0 + i);
      all = {max(all.begin, one.begin), min(all.end, one.end)};
      if (one.begin >= one.end) continue;
      any = any.begin >= any.end ? one : Range{min(any.begin, one.begin), max(any.end, one.end)};
    }
  }
};

// Query and query head of row r of an item.
// With one query, as in a decode, nothing is divided: that takes 30 instructions, at the beginning and at the end of a
// call, where they are executed once and wait to be fetched.
__device__ inline int nth_query(const WorkItem& item, int r) { return item.queries == 1 ? 0 : r / item.heads; }
__device__ inline int query_of(const WorkItem& item, int r) { return item.query0 + nth_query(item, r); }
__device__ inline int head_of(const AttentionParams& p, const WorkItem& item, int r) {
  return item.kv_head * p.heads_per_kv + item.head0 + r - nth_query(item, r) * item.heads;
}
__device__ inline int kv_head_of(const AttentionParams& p, const WorkItem& item, int r) {
  return head_of(p, item, r) / p.heads_per_kv;
}

// Index of row r of an item among all rows [batch, query, head].
__device__ inline std::int64_t global_row(const AttentionParams& p, const WorkItem& item, int r) {
  return (static_cast<std::int64_t>(item.batch) * p.queries + query_of(item, r)) * p.heads + head_of(p, item, r);
}

}  // namespace treeattn::kernels::cuda
