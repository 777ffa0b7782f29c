// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/prefill/prefill.cuh"

namespace treeattn::kernels::cuda {

Launch find_prefill_int8(int dim) { return prefill_launch<Int8Elements>(dim); }

}  // namespace treeattn::kernels::cuda
