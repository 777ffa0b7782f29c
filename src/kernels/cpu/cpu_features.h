// SPDX-License-Identifier: Apache-2.0
// What the processor we run on can do. On the other architecture's features: false.
#pragma once

namespace treeattn::kernels {

bool has_avx512();       // F, BW, DQ, VL
bool has_avx512_vnni();  // AVX-512 with VNNI: products of bytes
bool has_avx512_bf16();  // and with BF16
bool has_amx();          // and with tiles of bfloat16 and int8, which the system lets this process use
bool has_avx2();         // with FMA, F16C, BMI2
bool has_sse4();         // with AES and PCLMUL, as Highway takes it
bool has_sve();
bool has_sve_256();    // SVE with vectors of exactly 256 bits
bool has_neon();       // with AES, as Highway takes it
bool has_neon_dot();   // NEON with DOTPROD and FP16
bool has_neon_bf16();  // NEON with BF16, I8MM, DOTPROD and FP16FML
bool always_available();

}  // namespace treeattn::kernels
