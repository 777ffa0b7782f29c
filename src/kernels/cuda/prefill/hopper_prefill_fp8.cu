// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/prefill/prefill.cuh"

namespace treeattn::kernels::cuda {

Launch find_prefill_fp8(int dim) { return prefill_launch<Fp8Elements>(dim); }

}  // namespace treeattn::kernels::cuda
