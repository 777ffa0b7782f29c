// SPDX-License-Identifier: Apache-2.0
// Stands in for neon_bf16.cc, neon_f16.cc and neon_int8.cc on other architectures.
#include "kernels/cpu/targets.h"

namespace treeattn::kernels {

void use_neon_bf16(CpuTarget&) {}
void use_neon_f16(CpuTarget&) {}
void use_neon_int8(CpuTarget&) {}

}  // namespace treeattn::kernels
