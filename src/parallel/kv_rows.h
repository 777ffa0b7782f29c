// SPDX-License-Identifier: Apache-2.0
// From a caller's K or V into the rows of a cache: checks, and the conversion on the way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "treeattn/views.h"

namespace treeattn::parallel {

// Throws InvalidArgument unless the view is one sequence of rows [tokens, kv_heads, dim] of the type, or of one that
// can be converted. The page table is not read: see check_pages.
void check_source(std::string_view name, const KvView& source, std::int64_t kv_heads, std::int64_t dim, DType type);
// Throws InvalidArgument unless tokens [first, first + count) lie in pages of the view.
void check_pages(std::string_view name, const KvView& source, std::int64_t first, std::int64_t count);

// Copies tokens [first, first + count) of the checked source to rows [count, kv_heads, dim] of `type` and, where the
// type has them, scales [count, kv_heads]. Floats are rounded to nearest even; int8 and fp8 as quantize_row_int8 and
// quantize_row_fp8 say (base/half.h).
void store_rows(const KvView& source, std::int64_t first, std::int64_t count, DType type, std::byte* rows,
                float* scales);

}  // namespace treeattn::parallel
