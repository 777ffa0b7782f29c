// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/prefill/prefill.cuh"

namespace treeattn::kernels::cuda {

Launch find_prefill_f16(int dim) { return prefill_launch<SameElements<__half>>(dim); }

}  // namespace treeattn::kernels::cuda
