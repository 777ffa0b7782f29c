// SPDX-License-Identifier: Apache-2.0
// Strides of the usual layouts.
#include "treeattn/views.h"

#include <limits>

namespace treeattn {

namespace {

// A product that does not fit becomes the largest integer: the call the view is passed to refuses it there, where the
// argument has a name.
std::int64_t saturating_mul(std::int64_t a, std::int64_t b) {
  std::int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) return std::numeric_limits<std::int64_t>::max();
  return product;
}

}  // namespace

QueryView QueryView::dense(const void* data, DType dtype, std::int64_t batch, std::int64_t queries, std::int64_t heads,
                           std::int64_t head_dim) {
  QueryView view;
  view.data = data;
  view.dtype = dtype;
  view.batch = batch;
  view.queries = queries;
  view.heads = heads;
  view.head_dim = head_dim;
  view.head_stride = head_dim;
  view.query_stride = saturating_mul(heads, view.head_stride);
  view.batch_stride = saturating_mul(queries, view.query_stride);
  return view;
}

KvView KvView::tokens_first(const void* data, DType dtype, std::int64_t batch, std::int64_t tokens,
                            std::int64_t kv_heads, std::int64_t head_dim) {
  KvView view;
  view.data = data;
  view.dtype = dtype;
  view.batch = batch;
  view.tokens = tokens;
  view.kv_heads = kv_heads;
  view.head_dim = head_dim;
  view.head_stride = head_dim;
  view.token_stride = saturating_mul(kv_heads, view.head_stride);
  view.batch_stride = saturating_mul(tokens, view.token_stride);
  return view;
}

KvView KvView::heads_first(const void* data, DType dtype, std::int64_t batch, std::int64_t tokens,
                           std::int64_t kv_heads, std::int64_t head_dim) {
  KvView view = tokens_first(data, dtype, batch, tokens, kv_heads, head_dim);
  view.token_stride = head_dim;
  view.head_stride = saturating_mul(tokens, view.token_stride);
  view.batch_stride = saturating_mul(kv_heads, view.head_stride);
  return view;
}

KvView KvView::paged(const void* data, DType dtype, std::int64_t pages, std::int64_t page_tokens, std::int64_t kv_heads,
                     std::int64_t head_dim, std::int64_t batch, std::int64_t pages_per_sequence,
                     const std::int32_t* page_table) {
  KvView view = tokens_first(data, dtype, batch, saturating_mul(pages_per_sequence, page_tokens), kv_heads, head_dim);
  view.batch_stride = 0;  // the page table stands in for it
  view.page_tokens = page_tokens;
  view.page_stride = saturating_mul(page_tokens, view.token_stride);
  view.pages = pages;
  view.pages_per_sequence = pages_per_sequence;
  view.page_table = page_table;
  return view;
}

KvView KvView::with_scales(const float* row_scales) const {
  KvView view = *this;
  view.scales = row_scales;
  if (head_dim <= 0) return view;  // refused later, by name
  // In a dense layout every stride counts whole rows, and there is one scale per row.
  view.scale_batch_stride = batch_stride / head_dim;
  view.scale_token_stride = token_stride / head_dim;
  view.scale_head_stride = head_stride / head_dim;
  view.scale_page_stride = page_stride / head_dim;
  return view;
}

}  // namespace treeattn
