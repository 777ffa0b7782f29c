// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/decode/decode_mma8.cuh"

namespace treeattn::kernels::cuda {

Launch find_decode_fp8(int dim, int rows, bool two_heads) { return decode_mma8_launch<Fp8Bytes>(dim, rows, two_heads); }

}  // namespace treeattn::kernels::cuda
