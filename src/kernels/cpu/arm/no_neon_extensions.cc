// SPDX-License-Identifier: Apache-2.0
// Stands in for the neon_*.cc on other architectures.
#include "kernels/cpu/targets.h"

namespace treeattn::kernels {

void use_neon_bf16(CpuTarget&) {}
void use_neon_f16(CpuTarget&) {}
void use_neon_int8(CpuTarget&) {}
void use_neon_bf16_prefill(CpuTarget&) {}
void use_neon_f32_prefill(CpuTarget&) {}
void use_neon_dot_int8(CpuTarget&) {}
void use_neon_dot_widen(CpuTarget&) {}
void use_neon_linear_bf16(ModelKernels&) {}
void use_neon_linear_int8(ModelKernels&) {}
void use_neon_dot_linear_floats(ModelKernels&) {}
void use_neon_dot_linear_int8(ModelKernels&) {}

}  // namespace treeattn::kernels
