// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/prefill/prefill.cuh"

namespace treeattn::kernels::cuda {

Launch find_prefill_bf16(int dim) { return prefill_launch<SameElements<__nv_bfloat16>>(dim); }

}  // namespace treeattn::kernels::cuda
