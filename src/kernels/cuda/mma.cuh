// SPDX-License-Identifier: Apache-2.0
// The instructions of the tensor-core kernels, with names.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace treeattn::kernels::cuda {

__device__ inline std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes from global to shared memory, asynchronously; zeros where `valid` is false.
__device__ inline void copy_async_16(std::uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(valid ? 16 : 0));
}

// The same for 4 bytes.
__device__ inline void copy_async_4(std::uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(to), "l"(from), "r"(valid ? 4 : 0));
}

// Until all such copies of this thread are there.
__device__ inline void wait_for_all_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// kBytes from shared memory, aligned to as much; 2 bytes leave the upper half of a word zero.
template <int kBytes>
__device__ inline void load_shared(std::uint32_t (&r)[(kBytes + 3) / 4], std::uint32_t address) {
  static_assert(kBytes == 2 || kBytes == 4 || kBytes == 8 || kBytes == 16);
  if constexpr (kBytes == 16) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
  } else if constexpr (kBytes == 8) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];\n" : "=r"(r[0]), "=r"(r[1]) : "r"(address));
  } else if constexpr (kBytes == 4) {
    asm volatile("ld.shared.u32 %0, [%1];\n" : "=r"(r[0]) : "r"(address));
  } else {
    asm volatile("ld.shared.u16 %0, [%1];\n" : "=r"(r[0]) : "r"(address));
  }
}

__device__ inline void store_shared(std::uint32_t address, float4 x) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
               : "memory");
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void load_matrices(std::uint32_t (&r)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
__device__ inline void load_matrices_transposed(std::uint32_t (&r)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// c [16, 8] += a [16, 16] b [16, 8], float32 sums.
template <class T>
__device__ void multiply_add(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1);

template <>
__device__ inline void multiply_add<__nv_bfloat16>(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                                   std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ inline void multiply_add<__half>(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                            std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c [16, 8] += a [16, 32] b [32, 8], signed bytes, exactly.
__device__ inline void multiply_add_bytes(int (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                          std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c [16, 8] += a [16, 8] b [8, 8], of float32 the upper 19 bits: what is below them is taken for zero. (The GPUs so far
// do so; no manual promises it.)
__device__ inline void multiply_add_tf32(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                         std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two floats as a pair of T, rounded; the first in the low half.
template <class T>
__device__ std::uint32_t pack(float low, float high);
template <>
__device__ inline std::uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}
template <>
__device__ inline std::uint32_t pack<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}

template <class T>
__device__ float2 unpack(std::uint32_t pair);
template <>
__device__ inline float2 unpack<__nv_bfloat16>(std::uint32_t pair) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
}
template <>
__device__ inline float2 unpack<__half>(std::uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

// The upper limbs of two floats, as a pair of T; a and b become what is left of them.
template <class T>
__device__ inline std::uint32_t take_limbs(float& a, float& b) {
  const std::uint32_t limbs = pack<T>(a, b);
  const float2 taken = unpack<T>(limbs);
  a -= taken.x;
  b -= taken.y;
  return limbs;
}

// The largest of 16, 8, 4 and 2 that divides.
constexpr int load_bytes(int bytes) { return bytes % 16 == 0 ? 16 : bytes % 8 == 0 ? 8 : bytes % 4 == 0 ? 4 : 2; }

// Four elements of q, aligned to as much.
template <class T>
__device__ inline float4 four_elements(const std::byte* from) {
  const uint2 pairs = *reinterpret_cast<const uint2*>(from);
  const float2 low = unpack<T>(pairs.x), high = unpack<T>(pairs.y);
  return make_float4(low.x, low.y, high.x, high.y);
}
template <>
__device__ inline float4 four_elements<float>(const std::byte* from) {
  return *reinterpret_cast<const float4*>(from);
}

}  // namespace treeattn::kernels::cuda
