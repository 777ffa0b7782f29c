// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <bit>

#include "kernels/cuda/driver_entry.h"
#include "kernels/cuda/launch.h"

namespace treeattn::kernels::cuda {
namespace {

PFN_cuTensorMapEncodeTiled_v12000 find_encoder() {
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(driver_entry("cuTensorMapEncodeTiled"));
}

}  // namespace

bool make_tensor_map(const KvView& view, std::int64_t first_key, int tile, bool whole_lines, TensorMap& map) {
  static_assert(sizeof(TensorMap) == sizeof(CUtensorMap) && alignof(TensorMap) >= alignof(CUtensorMap));
  if (!code_is_for_hopper()) return false;
  const bool paged = view.page_tokens > 0;
  if (paged && (view.page_tokens % tile != 0 || first_key % tile != 0)) return false;
  const auto encode = find_encoder();
  if (encode == nullptr) return false;
  const auto size = static_cast<std::int64_t>(dtype_size(view.dtype));
  const std::int64_t outer = paged ? view.pages : view.batch, tokens = paged ? view.page_tokens : view.tokens;
  const std::int64_t outer_stride = paged ? view.page_stride : view.batch_stride;
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(view.head_dim), static_cast<cuuint64_t>(view.kv_heads),
                               static_cast<cuuint64_t>(tokens), static_cast<cuuint64_t>(outer)};
  // A dimension of one element may have any stride; the driver wants a positive one.
  const auto bytes = [&](std::int64_t stride, std::int64_t count) {
    return static_cast<cuuint64_t>(count > 1 ? stride * size : 16);
  };
  const cuuint64_t strides[3] = {bytes(view.head_stride, view.kv_heads), bytes(view.token_stride, tokens),
                                 bytes(outer_stride, outer)};
  const bool half_line = view.head_dim * size <= 64;
  const bool narrow = half_line && !whole_lines;  // PieceCopy::kPitch
  // Of a line that two heads share, the second finds its half in the L2 cache.
  const CUtensorMapL2promotion promotion =
      half_line ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_NONE;
  const cuuint32_t box[4] = {static_cast<cuuint32_t>((narrow ? 64 : 128) / size), 1, static_cast<cuuint32_t>(tile), 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const CUtensorMapDataType type = size == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : size == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                                               : CU_TENSOR_MAP_DATA_TYPE_UINT32;
  CUtensorMap encoded;
  const CUresult result = encode(
      &encoded, type, 4, const_cast<void*>(view.data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      narrow ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) return false;
  map = std::bit_cast<TensorMap>(encoded);
  return true;
}

}  // namespace treeattn::kernels::cuda
