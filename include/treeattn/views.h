// SPDX-License-Identifier: Apache-2.0
// Non-owning views of q, K and V. A view copies nothing and owns nothing: the memory must outlive the call it is
// passed to. Strides are in elements, 1 or more (0 along one row); the innermost dimension (head_dim) is contiguous.
// Nothing here throws: the call that a view is passed to refuses what it does not take, by name (InvalidArgument).
#pragma once

#include <cstdint>
#include <span>

#include "treeattn/dtype.h"

namespace treeattn {

// The queries. Types: float32, float16, bfloat16; rows aligned to their element size.
struct QueryView {
  const void* data = nullptr;  // [batch, queries, heads, head_dim]
  DType dtype = DType::kFloat32;
  std::int64_t batch = 0;
  std::int64_t queries = 0;
  std::int64_t heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t batch_stride = 0;
  std::int64_t query_stride = 0;
  std::int64_t head_stride = 0;

  // A dense [batch, queries, heads, head_dim] array.
  static QueryView dense(const void* data, DType dtype, std::int64_t batch, std::int64_t queries, std::int64_t heads,
                         std::int64_t head_dim);
};

// K or V of a batch of sequences: token t of sequence b, head h, is the head_dim elements at
//   unpaged:  data + b * batch_stride + t * token_stride + h * head_stride
//   paged:    data + page * page_stride + (t % page_tokens) * token_stride + h * head_stride,
//             page = page_table[b * pages_per_sequence + t / page_tokens]
// Any type; rows aligned to their element size.
struct KvView {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::int64_t batch = 0;
  std::int64_t tokens = 0;  // capacity of a sequence; how many are used is in AttentionInput::lengths
  std::int64_t kv_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t batch_stride = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;

  // Row scales, one float32 per token and head, addressed like the rows with the strides below. Required for int8;
  // optional for fp8 (none means 1); not accepted for the other types. A row of zeros had better have a small one: a
  // value is as exact as the largest product of weight and scale near it allows (docs/exactness.md, 1').
  const float* scales = nullptr;
  std::int64_t scale_batch_stride = 0;
  std::int64_t scale_token_stride = 0;
  std::int64_t scale_head_stride = 0;
  std::int64_t scale_page_stride = 0;

  // Paging. page_tokens == 0 means unpaged.
  std::int64_t page_tokens = 0;
  std::int64_t page_stride = 0;
  std::int64_t pages = 0;  // pages `data` holds: every used entry of the table must be below this
  std::int64_t pages_per_sequence = 0;
  const std::int32_t* page_table = nullptr;  // [batch, pages_per_sequence]

  // A dense [batch, tokens, kv_heads, head_dim] array.
  static KvView tokens_first(const void* data, DType dtype, std::int64_t batch, std::int64_t tokens,
                             std::int64_t kv_heads, std::int64_t head_dim);
  // A dense [batch, kv_heads, tokens, head_dim] array.
  static KvView heads_first(const void* data, DType dtype, std::int64_t batch, std::int64_t tokens,
                            std::int64_t kv_heads, std::int64_t head_dim);
  // A pool of dense pages [pages, page_tokens, kv_heads, head_dim] and a table [batch, pages_per_sequence].
  static KvView paged(const void* data, DType dtype, std::int64_t pages, std::int64_t page_tokens,
                      std::int64_t kv_heads, std::int64_t head_dim, std::int64_t batch, std::int64_t pages_per_sequence,
                      const std::int32_t* page_table);

  // The same view with dense row scales: [batch, tokens, kv_heads], [batch, kv_heads, tokens] or
  // [pages, page_tokens, kv_heads], matching the layout of this view. Requires a view made by one of the above.
  KvView with_scales(const float* scales) const;
};

}  // namespace treeattn
