// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/decode/decode_mma32.cuh"

namespace treeattn::kernels::cuda {

Launch find_decode_f32(int dim, int rows, std::size_t most_bytes) {
  return decode_mma_launch<float>(dim, rows, most_bytes);
}

}  // namespace treeattn::kernels::cuda
