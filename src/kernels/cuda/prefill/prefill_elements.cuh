// SPDX-License-Identifier: Apache-2.0
// What the elements of K and V are in memory, and what they are where products want them. A prefill kernel is made for
// one of these kinds and a head dim.
#pragma once

#include "kernels/cuda/byte_elements.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/weights.cuh"

namespace treeattn::kernels::cuda {

// 16-bit numbers, multiplied as they arrive.
template <class T>
struct SameElements {
  using Type = T;                          // of q, weights and products
  static constexpr int kBytes = 2;         // of an element in memory
  static constexpr bool kWidened = false;  // on the way
  static constexpr float kShift = kWeightShift<T>;
  static constexpr int kFewRegisters = 40, kManyRegisters = 232;  // of those who bring tiles, of those who multiply
};

// 8-bit numbers with a float32 scale a row. They become bfloat16, which holds every one of them: int8 has 7 bits and a
// sign, or is -128, and e4m3 has 4 bits.
struct WidenedElements {
  using Type = __nv_bfloat16;
  static constexpr int kBytes = 1;
  static constexpr bool kWidened = true;
  // A weight times a small scale may have to be a number that tensor cores take for zero. An element is below 2^9, so
  // with this what is lost of a sum is below 2^-126 a key.
  static constexpr float kShift = 14.0f;
  static constexpr int kFewRegisters = 72, kManyRegisters = 216;
};

// Four bytes in a word become two pairs, in their order.
struct Int8Elements : WidenedElements {
  __device__ void widen(std::uint32_t word, std::uint32_t& first, std::uint32_t& second) const {
    first = wide.widened<Int8AsBfloat16::kFirstTwo>(word);
    second = wide.widened<Int8AsBfloat16::kLastTwo>(word);
  }

 private:
  const Int8AsBfloat16 wide{};
};

struct Fp8Elements : WidenedElements {
  // By way of float16 and float32, which keep a NaN.
  __device__ static void widen(std::uint32_t word, std::uint32_t& first, std::uint32_t& second) {
    std::uint32_t halves[2];
    Fp8Bytes::widen(word, halves[0], halves[1]);
    const float2 low = unpack<__half>(halves[0]), high = unpack<__half>(halves[1]);
    first = pack<__nv_bfloat16>(low.x, low.y);
    second = pack<__nv_bfloat16>(high.x, high.y);
  }
};

}  // namespace treeattn::kernels::cuda
