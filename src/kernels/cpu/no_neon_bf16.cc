// SPDX-License-Identifier: Apache-2.0
// Stands in for neon_bf16.cc on other architectures.
#include "kernels/cpu/targets.h"

namespace treeattn::kernels {

void use_neon_bf16(CpuTarget&) {}

}  // namespace treeattn::kernels
