// SPDX-License-Identifier: Apache-2.0
// 8-bit elements become float16 (or bfloat16), exactly, two at a time. The four bytes of a word give two pairs, in
// whatever order costs least: the other factor of a product follows it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace treeattn::kernels::cuda {

struct Int8Bytes {
  // Which byte of a word is element i of a pair.
  __host__ __device__ static constexpr int byte_of(int pair, int i) { return pair + 2 * i; }

  // 0x6400 + x is the float16 1024 + x for x below 256; with the sign bit turned, x is the element plus 128.
  __device__ static void widen(std::uint32_t word, std::uint32_t& first, std::uint32_t& second) {
    first = less_1152(from_low_bytes(word));
    second = less_1152(from_low_bytes(word >> 8));
  }

  // Bytes 2 part and 2 part + 1 of two keys, such that widen gives the keys' pair of each.
  template <int kPart>
  __device__ static std::uint32_t pair_up(std::uint32_t key, std::uint32_t next_key) {
    return __byte_perm(key, next_key, kPart == 0 ? 0x5410 : 0x7632);
  }

 private:
  // (word & 0x00ff00ff) ^ 0x64806480, in one instruction: the compiler makes two of it.
  __device__ static std::uint32_t from_low_bytes(std::uint32_t word) {
    std::uint32_t pair;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;\n" : "=r"(pair) : "r"(word), "r"(0x00ff00ffu), "r"(0x64806480u));
    return pair;
  }
  __device__ static std::uint32_t less_1152(std::uint32_t pair) {
    const std::uint32_t offset = 0x64806480u;
    const __half2 less = __hsub2(*reinterpret_cast<const __half2*>(&pair), *reinterpret_cast<const __half2*>(&offset));
    return *reinterpret_cast<const std::uint32_t*>(&less);
  }
};

struct Fp8Bytes {
  __host__ __device__ static constexpr int byte_of(int pair, int i) { return 2 * pair + i; }

  // An instruction of its own on Ada, Hopper and later. A NaN stays one.
  __device__ static void widen(std::uint32_t word, std::uint32_t& first, std::uint32_t& second) {
#if __CUDA_ARCH__ >= 890
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n}\n"
        : "=r"(first), "=r"(second)
        : "r"(word));
#else
    first = half_pair(static_cast<__nv_fp8x2_storage_t>(word));
    second = half_pair(static_cast<__nv_fp8x2_storage_t>(word >> 16));
#endif
  }

  template <int kPart>
  __device__ static std::uint32_t pair_up(std::uint32_t key, std::uint32_t next_key) {
    return __byte_perm(key, next_key, kPart == 0 ? 0x5140 : 0x7362);
  }

 private:
  __device__ static std::uint32_t half_pair(__nv_fp8x2_storage_t bytes) {
    const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(bytes, __NV_E4M3);
    return static_cast<std::uint32_t>(pair.x) | static_cast<std::uint32_t>(pair.y) << 16;
  }
};

// Bytes as bfloat16, where that is wanted: exactly, as it has 8 bits.
class Int8AsBfloat16 {
 public:
  // Two of four bytes, which kBytesOfPair choose, as a pair. 0x43 and seven bits are 128 and these bits; 0x43 and the
  // sign alone are 128, or 256 where it is set: what is too much.
  template <unsigned kBytesOfPair>
  __device__ std::uint32_t widened(std::uint32_t bytes) const {
    const std::uint32_t pair = __byte_perm(bytes, exponents, kBytesOfPair);
    const std::uint32_t value = pair & 0xff7fff7fu, excess = pair & 0xff80ff80u;
    const __nv_bfloat162 result =
        __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&value), *reinterpret_cast<const __nv_bfloat162*>(&excess));
    return *reinterpret_cast<const std::uint32_t*>(&result);
  }
  static constexpr unsigned kFirstTwo = 0x4140, kLastTwo = 0x4342;

 private:
  // A number the compiler does not know (the grid has one row), or it would copy it to a register for every use.
  const std::uint32_t exponents = 0x43434343u * gridDim.y;
};

}  // namespace treeattn::kernels::cuda
