// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/decode/decode_mma.cuh"

namespace treeattn::kernels::cuda {

Launch find_decode_bf16_limbs(int dim, int rows) { return decode_mma_of_limbs<__nv_bfloat16>(dim, rows); }

}  // namespace treeattn::kernels::cuda
