// SPDX-License-Identifier: Apache-2.0
// The tile registers of AMX: eight matrices of up to 16 rows of 64 bytes. Everything is static: see linear_loops.h. The
// instructions are written out, as compilers' intrinsics do not say that they read and write memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace treeattn::kernels::amx {

inline constexpr int kRows = 16;

// What LDTILECFG reads.
struct alignas(64) TileShapes {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};

  void set(int tile, std::int64_t count, std::int64_t bytes) {
    rows[tile] = static_cast<std::uint8_t>(count);
    row_bytes[tile] = static_cast<std::uint16_t>(bytes);
  }
};

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

}  // namespace treeattn::kernels::amx
