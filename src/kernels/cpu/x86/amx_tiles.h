// SPDX-License-Identifier: Apache-2.0
// The tile registers of AMX: eight matrices of up to 16 rows of 64 bytes. Everything is static: see linear_loops.h. The
// instructions are written out, as compilers' intrinsics do not say that they read and write memory.
#pragma once

#include "kernels/cpu/x86/tile_shapes.h"
#ifdef TREEATTN_SOFTWARE_TILES
#include "kernels/cpu/x86/software_tiles.h"
#endif

namespace treeattn::kernels::amx {

#ifndef TREEATTN_SOFTWARE_TILES
// The registers in use while it lives; given back at the end, as the system must save them otherwise.
class Tiles {
 public:
  explicit Tiles(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
  ~Tiles() { asm volatile("tilerelease" ::); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  template <int T>
  void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
  }
  // Rows are `stride` bytes apart.
  template <int T>
  void load(const void* from, std::int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
  }
  template <int T>
  void store(void* to, std::int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
  }
  // Sum += A B. A row of B has, for each column, the pair (the four) of numbers that a pair (four) of A meets.
  template <int Sum, int A, int B>
  void add_bfloat16_products() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(A), "i"(B));
  }
  template <int Sum, int A, int B>
  void add_int8_products() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(A), "i"(B));
  }
};
#endif

// body.template operator()<register>(row, column) for the sums of A registers of rows by B of columns, 1 or 2 of each.
template <int A, int B, class Body>
static inline void for_each_sum(const Body& body) {
  body.template operator()<0>(0, 0);
  if constexpr (B == 2) body.template operator()<1>(0, 1);
  if constexpr (A == 2) body.template operator()<2>(1, 0);
  if constexpr (A == 2 && B == 2) body.template operator()<3>(1, 1);
}

// These sums += products. Factors are whole tiles, those of each step behind those of the last; the second row's and
// column's begin so many bytes behind the first's.
template <int A, int B>
static inline void add_bfloat16_products(Tiles& tiles, const std::byte* rows, std::int64_t to_second_row,
                                         const std::byte* columns, std::int64_t to_second_column, std::int64_t steps) {
  for (std::int64_t i = 0; i < steps; ++i, rows += kTileBytes, columns += kTileBytes) {
    tiles.load<6>(columns, kRowBytes);
    tiles.load<4>(rows, kRowBytes);
    tiles.add_bfloat16_products<0, 4, 6>();
    if constexpr (B == 2) {
      tiles.load<7>(columns + to_second_column, kRowBytes);
      tiles.add_bfloat16_products<1, 4, 7>();
    }
    if constexpr (A == 2) {
      tiles.load<5>(rows + to_second_row, kRowBytes);
      tiles.add_bfloat16_products<2, 5, 6>();
    }
    if constexpr (A == 2 && B == 2) tiles.add_bfloat16_products<3, 5, 7>();
  }
}

}  // namespace treeattn::kernels::amx
