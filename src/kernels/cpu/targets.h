// SPDX-License-Identifier: Apache-2.0
// The instruction sets that are compiled in, whether or not this processor has them.
#pragma once

#include <span>

#include "kernels/cpu/tile_ops.h"

namespace treeattn::kernels {

// Those written once over Highway vectors, best first. The last one runs anywhere.
std::span<const CpuTarget* const> highway_targets();

// Each replaces the entries of one K/V type in a NEON table by what newer instructions do better: BFMMLA, FMLAL, SMMLA.
// They do nothing where the library was not built for aarch64; to be used only if has_neon_bf16().
void use_neon_bf16(CpuTarget& target);
void use_neon_f16(CpuTarget& target);
void use_neon_int8(CpuTarget& target);
// After use_neon_bf16, whose errors it takes over: the same instructions where many rows share a head.
void use_neon_bf16_prefill(CpuTarget& target);
// Multiply-adds by a lane for float32, and what becomes float32, where many rows share a head; has_neon_dot() is
// enough.
void use_neon_f32_prefill(CpuTarget& target);
// Where there is no I8MM: SDOT for int8 K and V, if has_neon_dot().
void use_neon_dot_int8(CpuTarget& target);
// Decode in bfloat16, float16 and float32 by float32 multiply-adds; has_neon_dot() is enough.
void use_neon_dot_widen(CpuTarget& target);
// The same for linear maps, by type of the weights: BFMMLA, and SDOT and SMMLA.
void use_neon_linear_bf16(ModelKernels& kernels);
void use_neon_linear_int8(ModelKernels& kernels);
// For linear maps where has_neon_dot() is all there is: FMLA, and SDOT.
void use_neon_dot_linear_floats(ModelKernels& kernels);
void use_neon_dot_linear_int8(ModelKernels& kernels);
// int8 K and V in an AVX-512 table by VPDPBUSD and VPDPWSSD, if has_avx512_vnni(): as it is fastest on processors with
// nothing newer, and on those with AMX (so without a measurement on those with BF16 alone).
void use_avx512_int8(CpuTarget& target);
void use_amx_int8(CpuTarget& target);
// bfloat16 K and V that many rows share by tiles, if has_amx().
void use_amx_bf16_prefill(CpuTarget& target);
// For the linear maps of an AVX-512 table: VPDPBUSD, if has_avx512_vnni(); VDPBF16PS, if has_avx512_bf16(); tiles, if
// has_amx(). They do nothing where the library was not built for x86-64.
void use_avx512_linear_int8(ModelKernels& kernels);
void use_avx512_linear_bf16(ModelKernels& kernels);
void use_amx_linear_int8(ModelKernels& kernels);
void use_amx_linear_bf16(ModelKernels& kernels);

}  // namespace treeattn::kernels
