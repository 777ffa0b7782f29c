// SPDX-License-Identifier: Apache-2.0
// x86-64. In assembly, so that what is counted is what runs: 12 chains, enough for two a cycle that take six cycles.
#include "cpu/vector_loops.h"
#include "kernels/cpu/cpu_features.h"

namespace treeattn::bench {
namespace {

constexpr int kChains = 12;

// line(chain, b): numbers of registers.
#define TREEATTN_EACH(line, b)                                                                                  \
  line(0, b) line(1, b) line(2, b) line(3, b) line(4, b) line(5, b) line(6, b) line(7, b) line(8, b) line(9, b) \
      line(10, b) line(11, b)
#define TREEATTN_CLOBBERS                                                                                           \
  "cc", "memory", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", \
      "xmm12", "xmm13", "xmm14"
#define TREEATTN_ZERO(i, b) "vpxor %%xmm" #i ", %%xmm" #i ", %%xmm" #i "\n"

// Bits to multiply, as the power that a product takes depends on them: floats, which are bfloat16 and bytes as well.
// With -b every other product takes back what the one before it added (of floats).
struct alignas(16) Factors {
  unsigned a[4], b[4], minus_b[4];
};
constexpr Factors kFactors = {{0x3f9d3fa4, 0xbf2ebf7b, 0x3f6b3f1f, 0xbfc7bf14},
                              {0x3f513f85, 0x3fb33f33, 0xbf19bf9a, 0x3f8a3f71},
                              {0xbf51bf85, 0xbfb3bf33, 0x3f193f9a, 0xbf8abf71}};

// A loop whose body is the instruction once for each chain with factors a and b, and once with a and -b.
// line(i, b): the instruction of chain i, whose sum is register i; a is in register 12, b in 13, -b in 14.
#define TREEATTN_LOOP(name, widen, registers, line)                                                                    \
  double name(long rounds) {                                                                                           \
    long left = rounds;                                                                                                \
    asm volatile(widen " (%1), %%" registers "12\n" widen " 16(%1), %%" registers "13\n" widen " 32(%1), %%" registers \
                       "14\n" TREEATTN_EACH(TREEATTN_ZERO, 0) "0:\n" TREEATTN_EACH(line, 13)                           \
                           TREEATTN_EACH(line, 14) "dec %0\njnz 0b\nvzeroupper\n"                                      \
                 : "+r"(left)                                                                                          \
                 : "r"(&kFactors)                                                                                      \
                 : TREEATTN_CLOBBERS);                                                                                 \
    return 2.0 * kChains * static_cast<double>(rounds);                                                                \
  }

#define TREEATTN_FMA_256(i, b) "vfmadd231ps %%ymm" #b ", %%ymm12, %%ymm" #i "\n"
TREEATTN_LOOP(fma_256, "vbroadcastf128", "ymm", TREEATTN_FMA_256)

#define TREEATTN_FMA_512(i, b) "vfmadd231ps %%zmm" #b ", %%zmm12, %%zmm" #i "\n"
TREEATTN_LOOP(fma_512, "vbroadcastf32x4", "zmm", TREEATTN_FMA_512)

#define TREEATTN_DOT_BYTES(i, b) "vpdpbusd %%zmm" #b ", %%zmm12, %%zmm" #i "\n"
TREEATTN_LOOP(vpdpbusd, "vbroadcastf32x4", "zmm", TREEATTN_DOT_BYTES)

#define TREEATTN_DOT_BF16(i, b) "vdpbf16ps %%zmm" #b ", %%zmm12, %%zmm" #i "\n"
TREEATTN_LOOP(vdpbf16ps, "vbroadcastf32x4", "zmm", TREEATTN_DOT_BF16)

// Three cycles each on every core since 2008 (Intel) and 2017 (AMD). Some skip chains of additions.
double chain_of_products(long rounds) {
  constexpr int kCycles = 3 * kChains;
  long left = rounds, value = 1;
#define TREEATTN_PRODUCT(i, b) "imul %2, %1\n"
  asm volatile("0:\n" TREEATTN_EACH(TREEATTN_PRODUCT, 0) "dec %0\n"
                                                      "jnz 0b\n"
               : "+r"(left), "+r"(value)
               : "r"(rounds)
               : "cc");
  return static_cast<double>(kCycles) * static_cast<double>(rounds);
}

}  // namespace

std::vector<VectorLoop> vector_loops() {
  return {{"FMA 256", kernels::has_avx2(), fma_256},
          {"FMA 512", kernels::has_avx512(), fma_512},
          {"VPDPBUSD", kernels::has_avx512_vnni(), vpdpbusd},
          {"VDPBF16PS", kernels::has_avx512_bf16(), vdpbf16ps}};
}

ClockBurst clock_burst() { return chain_of_products; }

std::vector<KernelCount> kernel_counts() { return {}; }

}  // namespace treeattn::bench
