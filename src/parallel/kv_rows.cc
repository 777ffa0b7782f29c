// SPDX-License-Identifier: Apache-2.0
#include "parallel/kv_rows.h"

#include <cstring>

#include "base/check.h"
#include "base/half.h"
#include "kernels/head_dims.h"
#include "kernels/problem.h"

namespace treeattn::parallel {
namespace {

using base::require;

constexpr bool is_float(DType type) {
  return type == DType::kFloat32 || type == DType::kFloat16 || type == DType::kBFloat16;
}

void convert_row(const float* in, std::int64_t n, DType type, std::byte* out, float* scale) {
  const auto size = static_cast<std::size_t>(n);
  switch (type) {
    case DType::kFloat32:
    case DType::kFloat16:
    case DType::kBFloat16:
      base::store_row_from_float(in, size, type, out);
      return;
    case DType::kInt8:
      base::quantize_row_int8(in, size, reinterpret_cast<std::int8_t*>(out), scale, base::kScaleOfZeroRow);
      return;
    case DType::kFp8E4M3:
      base::quantize_row_fp8(in, size, reinterpret_cast<std::uint8_t*>(out), scale);
      return;
  }
}

}  // namespace

void check_source(std::string_view name, const KvView& source, std::int64_t kv_heads, std::int64_t dim, DType type) {
  require(source.batch == 1, "{}.batch = {}; accepted: 1", name, source.batch);
  require(source.tokens >= 0, "{}.tokens = {}; accepted: 0 or more", name, source.tokens);
  require(source.kv_heads == kv_heads, "{}.kv_heads = {}; accepted: the cache's, {}", name, source.kv_heads, kv_heads);
  require(source.head_dim == dim, "{}.head_dim = {}; accepted: the cache's, {}", name, source.head_dim, dim);
  require(source.dtype == type || is_float(source.dtype),
          "{}.dtype = {}; accepted: float32, float16, bfloat16 or the cache's, {}", name, dtype_name(source.dtype),
          dtype_name(type));
  if (source.tokens == 0) return;
  require(source.data != nullptr, "{}.data = null with {} tokens; accepted: their address", name, source.tokens);
  require(source.dtype != DType::kInt8 || source.scales != nullptr,
          "{}.scales = null with int8 values; accepted: one float32 per token and head", name);
  require(source.scales == nullptr || kernels::has_scales(source.dtype),
          "{}.scales = {} with {} values; accepted: scales for int8 and fp8 only", name,
          static_cast<const void*>(source.scales), dtype_name(source.dtype));
  const bool has_pages = source.page_table != nullptr || source.pages != 0 || source.pages_per_sequence != 0;
  require(source.page_tokens >= (has_pages ? 1 : 0), "{}.page_tokens = {}; accepted: 1 or more, or 0 and no pages",
          name, source.page_tokens);
  require(source.pages >= 0, "{}.pages = {}; accepted: 0 or more", name, source.pages);
  kernels::check_kv_layout(name, source);
  if (source.page_tokens == 0) return;
  require(source.page_table != nullptr, "{}.page_table = null; accepted: the address of int32 values", name);
  require(reinterpret_cast<std::uintptr_t>(source.page_table) % alignof(std::int32_t) == 0,
          "{}.page_table = {}; accepted: an address that is a multiple of {}", name,
          static_cast<const void*>(source.page_table), alignof(std::int32_t));
  require((source.tokens - 1) / source.page_tokens < source.pages_per_sequence,
          "{}.tokens = {} is more than pages_per_sequence * page_tokens = {} * {}; accepted: at most that", name,
          source.tokens, source.pages_per_sequence, source.page_tokens);
}

void check_pages(std::string_view name, const KvView& source, std::int64_t first, std::int64_t count) {
  if (source.page_tokens == 0 || count == 0) return;
  const std::int64_t last = (first + count - 1) / source.page_tokens;
  for (std::int64_t slot = first / source.page_tokens; slot <= last; ++slot) {
    const std::int64_t page = source.page_table[slot];
    require(page >= 0 && page < source.pages, "{}.page_table[0, {}] = {}; accepted: 0 to pages - 1 = {}", name, slot,
            page, source.pages - 1);
  }
}

void store_rows(const KvView& source, std::int64_t first, std::int64_t count, DType type, std::byte* rows,
                float* scales) {
  const std::int64_t dim = source.head_dim;
  const std::size_t row_bytes = static_cast<std::size_t>(dim) * dtype_size(type);
  const bool same = source.dtype == type;
  const bool dense_token = same && source.head_stride == dim;  // all heads of a token at once
  float wide[kernels::kMostHeadDim];
  for (std::int64_t token = first; token < first + count; ++token) {
    if (dense_token) {
      std::memcpy(rows, kernels::kv_row(source, 0, token, 0), row_bytes * static_cast<std::size_t>(source.kv_heads));
    }
    for (std::int64_t head = 0; head < source.kv_heads; ++head, rows += row_bytes) {
      float* scale = kernels::has_scales(type) ? scales++ : nullptr;
      if (!same) {
        base::load_row_as_float(kernels::kv_row(source, 0, token, head), source.dtype, dim, wide);
        convert_row(wide, dim, type, rows, scale);
        continue;
      }
      if (!dense_token) std::memcpy(rows, kernels::kv_row(source, 0, token, head), row_bytes);
      if (scale != nullptr) *scale = kernels::kv_scale(source, 0, token, head);
    }
  }
}

}  // namespace treeattn::parallel
