// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/decode/decode_mma.cuh"

namespace treeattn::kernels::cuda {

Launch find_decode_f16_limbs(int dim, int rows) { return decode_mma_of_limbs<__half>(dim, rows); }

}  // namespace treeattn::kernels::cuda
