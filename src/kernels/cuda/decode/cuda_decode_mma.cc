// SPDX-License-Identifier: Apache-2.0
// Which calls the tensor-core kernels serve.
#include <algorithm>
#include <cstdint>

#include "kernels/cuda/launch.h"

namespace treeattn::kernels::cuda {
namespace {

// Rows are copied in units of 16 bytes.
bool rows_aligned(const DeviceKv& kv) {
  const auto unit = static_cast<std::int64_t>(16 / dtype_size(kv.dtype));
  const bool strides = kv.dim % unit == 0 && kv.batch_stride % unit == 0 && kv.token_stride % unit == 0 &&
                       kv.head_stride % unit == 0 && kv.page_stride % unit == 0;
  return strides && reinterpret_cast<std::uintptr_t>(kv.data) % 16 == 0;
}

// Rows of q are loaded `elements` at a time.
bool queries_aligned(const AttentionParams& p, std::int64_t elements) {
  return reinterpret_cast<std::uintptr_t>(p.q) % (static_cast<std::size_t>(elements) * dtype_size(p.q_dtype)) == 0 &&
         p.q_batch_stride % elements == 0 && p.q_query_stride % elements == 0 && p.q_head_stride % elements == 0;
}

// Whether items take the KV heads two by two: they are short and lie side by side, and the tensor cores have rows to
// spare. Nothing of this differs between the parts of a cache that is spread over ranks.
bool heads_in_twos(const AttentionParams& p, int rows, int most_rows) {
  return p.k.dim == 64 && p.v.dim == 64 && p.k.head_stride == 64 && p.v.head_stride == 64 && p.kv_heads % 2 == 0 &&
         2 * rows <= most_rows;
}

// Items of at most `rows` rows.
Launch find_of_rows(const AttentionParams& p, int rows, std::size_t most_bytes) {
  if (!has_short_positions(p)) return {};
  if (p.k.dtype != p.v.dtype) return {};
  const int dim = std::max(p.k.dim, p.v.dim);
  if (!rows_aligned(p.k) || !rows_aligned(p.v)) return {};
  if (p.k.dtype == DType::kInt8 || p.k.dtype == DType::kFp8E4M3) {
    if (!queries_aligned(p, 4)) return {};
    // A float32 is two limbs, and they take the room of the second 8 rows.
    const int most = p.q_dtype == DType::kFloat32 ? 8 : 16;
    const bool two_heads = heads_in_twos(p, rows, most);
    const int taken = two_heads ? 2 * rows : std::min(rows, most);
    return p.k.dtype == DType::kInt8 ? find_decode_int8(dim, taken, two_heads) : find_decode_fp8(dim, taken, two_heads);
  }
  if (p.k.dtype == DType::kFloat32) {
    return queries_aligned(p, 4) ? find_decode_f32(dim, rows, most_bytes) : Launch{};
  }
  if (!queries_aligned(p, 2)) return {};
  if (p.k.dtype == DType::kBFloat16) {
    return p.q_dtype == p.k.dtype ? find_decode_bf16(dim, rows, most_bytes) : find_decode_bf16_limbs(dim, rows);
  }
  return p.q_dtype == p.k.dtype ? find_decode_f16(dim, rows, most_bytes) : find_decode_f16_limbs(dim, rows);
}

}  // namespace

bool has_short_positions(const AttentionParams& p) {
  constexpr std::int64_t kMost = std::int64_t{1} << 30;
  return p.first_key + p.most_tokens < kMost && p.order.chunk_tokens < kMost && p.k.page_tokens < kMost &&
         p.v.page_tokens < kMost;
}

Launch find_decode_mma(const AttentionParams& p, int most_rows, std::size_t most_bytes) {
  return with_rows_that_fit(most_rows, most_bytes, [&](int rows) { return find_of_rows(p, rows, most_bytes); });
}

}  // namespace treeattn::kernels::cuda
