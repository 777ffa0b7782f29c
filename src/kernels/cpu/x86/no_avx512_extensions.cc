// SPDX-License-Identifier: Apache-2.0
// Stands in for avx512_*.cc and amx_*.cc where the library is not built for x86-64.
#include "kernels/cpu/targets.h"

namespace treeattn::kernels {

void use_avx512_int8(CpuTarget&) {}
void use_amx_int8(CpuTarget&) {}
void use_amx_bf16_prefill(CpuTarget&) {}
void use_avx512_linear_int8(ModelKernels&) {}
void use_avx512_linear_bf16(ModelKernels&) {}
void use_amx_linear_int8(ModelKernels&) {}
void use_amx_linear_bf16(ModelKernels&) {}

}  // namespace treeattn::kernels
