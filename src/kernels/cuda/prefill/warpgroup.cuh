// SPDX-License-Identifier: Apache-2.0
// Hopper's matrix instructions of a warpgroup (four warps), with names. Only for code that is compiled for sm_90a.
//
// Matrices in shared memory lie as tensor copies put them (piece_copy.cuh): parts of 128 bytes a row, the 16-byte units
// of row r exchanged by r % 8. Sums [64, N] lie in registers: element 4 j + i of a thread belongs to row
// 16 warp + lane / 4 + 8 (i / 2) and column 8 j + 2 (lane % 4) + i % 2. A pair of such columns, as 16-bit numbers, is
// what the next product wants of its left side.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace treeattn::kernels::cuda {

// A matrix for the instructions. With rows along the sums (keys of K): row_step is unused. With rows along the inner
// dimension (keys of V): part_step is the distance between parts. Eight rows are 1024 bytes.
__device__ inline std::uint64_t matrix_at(std::uint32_t address, int part_step) {
  constexpr std::uint64_t kEightRows = std::uint64_t{1024 / 16} << 32, kExchanged = std::uint64_t{1} << 62;
  return kExchanged | kEightRows | static_cast<std::uint64_t>(part_step / 16) << 16 | (address & 0x3ffff) / 16;
}

// Registers and shared memory that were written before may be used by the instructions that follow.
__device__ inline void products_begin() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
// What was started since the last call is one group.
__device__ inline void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
// Waits until no more than kPending groups, the last ones, are under way.
template <int kPending>
__device__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}
// The compiler must not move uses of these numbers across this place.
template <int kCount>
__device__ void pin(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

// More registers for this warpgroup, or fewer.
template <int kCount>
__device__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kCount));
}
template <int kCount>
__device__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kCount));
}

// Among `threads` threads of the block; 0 is __syncthreads.
__device__ inline void barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ inline void barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(barrier), "r"(threads) : "memory");
}

// Started, not finished:
//   start_logits:  sums [64, N] (+)= a [64, 16] b [N, 16]^T, both in shared memory, rows along the sums
//   start_values:  sums [64, N] (+)= a [64, 16] b [16, N], a in registers, b in shared memory, rows along the inner
//                  dimension
// add: whether to what `sums` holds.
template <class T, int kColumns>
struct Products;

#define TREEATTN_SUMS_8(s, i)                                                                                 \
  "+f"(s[i]), "+f"(s[i + 1]), "+f"(s[i + 2]), "+f"(s[i + 3]), "+f"(s[i + 4]), "+f"(s[i + 5]), "+f"(s[i + 6]), \
      "+f"(s[i + 7])
#define TREEATTN_SUMS_32(s, i) \
  TREEATTN_SUMS_8(s, i), TREEATTN_SUMS_8(s, i + 8), TREEATTN_SUMS_8(s, i + 16), TREEATTN_SUMS_8(s, i + 24)
#define TREEATTN_SUMS_40(s) TREEATTN_SUMS_32(s, 0), TREEATTN_SUMS_8(s, 32)
#define TREEATTN_SUMS_48(s) TREEATTN_SUMS_40(s), TREEATTN_SUMS_8(s, 40)
#define TREEATTN_SUMS_64(s) TREEATTN_SUMS_32(s, 0), TREEATTN_SUMS_32(s, 32)
#define TREEATTN_NUMBERS_32                                                                         \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
  "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TREEATTN_NUMBERS_40 \
  TREEATTN_NUMBERS_32       \
  ", "                      \
  "%32, %33, %34, %35, %36, %37, %38, %39"
#define TREEATTN_NUMBERS_48 \
  TREEATTN_NUMBERS_40       \
  ", "                      \
  "%40, %41, %42, %43, %44, %45, %46, %47"
#define TREEATTN_NUMBERS_64 \
  TREEATTN_NUMBERS_48       \
  ", "                      \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// a0 to a5: the numbers of the operands that follow the sums.
#define TREEATTN_PRODUCTS(T, TYPE, COLUMNS, NUMBERS, SUMS, a0, a1, a2, a3, a4, a5)                                    \
  template <>                                                                                                         \
  struct Products<T, COLUMNS> {                                                                                       \
    __device__ static void start_logits(float (&s)[COLUMNS / 2], std::uint64_t a, std::uint64_t b, bool add) {        \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" a2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #COLUMNS         \
                   "k16.f32." TYPE "." TYPE " {" NUMBERS "}, %" a0 ", %" a1 ", p, 1, 1, 0, 0;\n}\n"                   \
                   : SUMS                                                                                             \
                   : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                                     \
    }                                                                                                                 \
    __device__ static void start_values(float (&s)[COLUMNS / 2], const std::uint32_t* a, std::uint64_t b, bool add) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" a5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #COLUMNS         \
                   "k16.f32." TYPE "." TYPE " {" NUMBERS "}, {%" a0 ", %" a1 ", %" a2 ", %" a3 "}, %" a4              \
                   ", p, 1, 1, 1;\n}\n"                                                                               \
                   : SUMS                                                                                             \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));                 \
    }                                                                                                                 \
  };
#define TREEATTN_PRODUCTS_OF(T, TYPE)                                                                             \
  TREEATTN_PRODUCTS(T, TYPE, 64, TREEATTN_NUMBERS_32, TREEATTN_SUMS_32(s, 0), "32", "33", "34", "35", "36", "37") \
  TREEATTN_PRODUCTS(T, TYPE, 80, TREEATTN_NUMBERS_40, TREEATTN_SUMS_40(s), "40", "41", "42", "43", "44", "45")    \
  TREEATTN_PRODUCTS(T, TYPE, 96, TREEATTN_NUMBERS_48, TREEATTN_SUMS_48(s), "48", "49", "50", "51", "52", "53")    \
  TREEATTN_PRODUCTS(T, TYPE, 128, TREEATTN_NUMBERS_64, TREEATTN_SUMS_64(s), "64", "65", "66", "67", "68", "69")

TREEATTN_PRODUCTS_OF(__nv_bfloat16, "bf16")
TREEATTN_PRODUCTS_OF(__half, "f16")

#undef TREEATTN_PRODUCTS_OF
#undef TREEATTN_PRODUCTS
#undef TREEATTN_NUMBERS_64
#undef TREEATTN_NUMBERS_48
#undef TREEATTN_NUMBERS_40
#undef TREEATTN_NUMBERS_32
#undef TREEATTN_SUMS_64
#undef TREEATTN_SUMS_48
#undef TREEATTN_SUMS_40
#undef TREEATTN_SUMS_32
#undef TREEATTN_SUMS_8

}  // namespace treeattn::kernels::cuda
