// SPDX-License-Identifier: Apache-2.0
// Which calls the tensor-core kernels serve.
#include <cstdint>

#include "kernels/cuda/launch.h"

namespace treeattn::kernels::cuda {
namespace {

// Rows are copied in units of 16 bytes.
bool rows_aligned(const DeviceKv& kv) {
  const bool strides =
      kv.batch_stride % 8 == 0 && kv.token_stride % 8 == 0 && kv.head_stride % 8 == 0 && kv.page_stride % 8 == 0;
  return strides && reinterpret_cast<std::uintptr_t>(kv.data) % 16 == 0;
}

}  // namespace

Launch find_decode_mma(const AttentionParams& p, int rows) {
  const bool same_type = p.k.dtype == p.q_dtype && p.v.dtype == p.q_dtype && p.k.dim == p.v.dim;
  const bool q_aligned = reinterpret_cast<std::uintptr_t>(p.q) % 4 == 0 && p.q_batch_stride % 2 == 0 &&
                         p.q_query_stride % 2 == 0 && p.q_head_stride % 2 == 0;
  // Positions are 32-bit numbers in these kernels.
  if (p.first_key + p.most_tokens >= (std::int64_t{1} << 30) || p.order.chunk_tokens >= (1 << 30)) return {};
  if (!same_type || !q_aligned || !rows_aligned(p.k) || !rows_aligned(p.v)) return {};
  if (p.q_dtype == DType::kBFloat16) return find_decode_bf16(p.k.dim, rows);
  if (p.q_dtype == DType::kFloat16) return find_decode_f16(p.k.dim, rows);
  return {};
}

}  // namespace treeattn::kernels::cuda
