// SPDX-License-Identifier: Apache-2.0
// The tensor-core kernels that exist, and which calls they serve.
#include "kernels/cuda/decode_mma.cuh"

namespace treeattn::kernels::cuda {
namespace {

// Three pieces of every warp under way where two blocks of that fit into a multiprocessor, else two.
template <class T, int kDim>
Launch launch_for(int rows, int leaves) {
  constexpr int kMostStages = kDim <= 128 ? 3 : 2;
  if (rows > 4) return decode_mma_launch<T, kDim, 2>(rows, leaves);
  return decode_mma_launch<T, kDim, kMostStages>(rows, leaves);
}

template <class T>
Launch launch_for(int dim, int rows, int leaves) {
  switch (dim) {
    case 64:
      return launch_for<T, 64>(rows, leaves);
    case 80:
      return launch_for<T, 80>(rows, leaves);
    case 96:
      return launch_for<T, 96>(rows, leaves);
    case 128:
      return launch_for<T, 128>(rows, leaves);
    case 256:
      return launch_for<T, 256>(rows, leaves);
    default:
      return {};
  }
}

// Rows are copied 16 bytes at a time.
bool rows_aligned(const DeviceKv& kv) {
  const bool strides =
      kv.batch_stride % 8 == 0 && kv.token_stride % 8 == 0 && kv.head_stride % 8 == 0 && kv.page_stride % 8 == 0;
  return strides && reinterpret_cast<std::uintptr_t>(kv.data) % 16 == 0;
}

}  // namespace

Launch find_decode_mma(const AttentionParams& p, int rows, int leaves) {
  const bool same_type = p.k.dtype == p.q_dtype && p.v.dtype == p.q_dtype && p.k.dim == p.v.dim;
  const bool q_aligned = reinterpret_cast<std::uintptr_t>(p.q) % 4 == 0 && p.q_batch_stride % 2 == 0 &&
                         p.q_query_stride % 2 == 0 && p.q_head_stride % 2 == 0;
  // Positions are 32-bit numbers in these kernels.
  if (p.first_key + p.most_tokens >= (std::int64_t{1} << 30) || p.order.chunk_tokens >= (1 << 30)) return {};
  if (!same_type || !q_aligned || !rows_aligned(p.k) || !rows_aligned(p.v)) return {};
  if (p.q_dtype == DType::kBFloat16) return launch_for<__nv_bfloat16>(p.k.dim, rows, leaves);
  if (p.q_dtype == DType::kFloat16) return launch_for<__half>(p.k.dim, rows, leaves);
  return {};
}

}  // namespace treeattn::kernels::cuda
