// SPDX-License-Identifier: Apache-2.0
// How a streamed map's weights lie in shared memory and become operands of tensor cores, by their type. A warp has a
// group of kGroup columns at a time, and multiplies kStep of them by x in one go: a thread has columns 8t to 8t + 7 of
// these, of two rows. kGroup is the same for every type of weights and number of rows: the order of sums hangs on it.
#pragma once

#include "kernels/cuda/byte_elements.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/model_ops.h"

namespace treeattn::kernels::cuda {

inline constexpr int kGroup = 128;
inline constexpr int kStep = 32;  // columns of one load of a thread's row: two products

__device__ inline uint4 load_shared(std::uint32_t address) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

// Of each: bytes of a weight, and of the scales of a row of a group; most groups that a warp asks for before x is
// there; a thread's weights of one step, and their products with x.
struct BFloat16Weights {
  static constexpr int kBytes = 2, kScaleBytes = 0;
  static constexpr int kEarly = 1 << 10;  // all that are on their way at a time
  struct Operands {
    std::uint32_t first[4], second[4];
  };

  // Where in its row a unit of 16 bytes lies: two rows that are read together lie in different banks.
  __device__ static int exchanged(int row, int unit) { return unit ^ row % 2 * 4; }

  template <class Slot>
  __device__ Operands load(std::uint32_t slot, int row, int step, int part) const {
    const uint4 low = load_shared(slot + Slot::weight(0, row, step * 4 + part));
    const uint4 high = load_shared(slot + Slot::weight(1, row, step * 4 + part));
    return {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
  }
  __device__ static void add(float (&sum)[4], const Operands& w, const uint4& x) {
    multiply_add<__nv_bfloat16>(sum, w.first, x.x, x.y);
    multiply_add<__nv_bfloat16>(sum, w.second, x.z, x.w);
  }
};

// They become bfloat16, which holds every byte. A step is the columns of one scale, and its sums are multiplied by
// that.
struct Int8Weights {
  static constexpr int kBytes = 1;
  static constexpr int kEarly = 2;  // x waits behind these, and all the work behind x
  static constexpr int kScaleBytes = kGroup / kStep * static_cast<int>(sizeof(float));
  static_assert(kStep == kWeightGroup);
  struct Operands {
    std::uint32_t first[4], second[4];
    float low_scale, high_scale;
  };

  // Four rows are read together, 32 bytes of each.
  __device__ static int exchanged(int row, int unit) { return unit ^ row % 4 * 2; }

  template <class Slot>
  __device__ Operands load(std::uint32_t slot, int row, int step, int part) const {
    const uint2 low = load_eight(slot + Slot::weight(0, row, step * 2 + part / 2) + part % 2 * 8);
    const uint2 high = load_eight(slot + Slot::weight(1, row, step * 2 + part / 2) + part % 2 * 8);
    const auto first = [&](std::uint32_t word) { return wide.widened<Int8AsBfloat16::kFirstTwo>(word); };
    const auto last = [&](std::uint32_t word) { return wide.widened<Int8AsBfloat16::kLastTwo>(word); };
    return {{first(low.x), first(high.x), last(low.x), last(high.x)},
            {first(low.y), first(high.y), last(low.y), last(high.y)},
            load_scale(slot + Slot::scales(0, row) + step * 4),
            load_scale(slot + Slot::scales(1, row) + step * 4)};
  }
  __device__ static void add(float (&sum)[4], const Operands& w, const uint4& x) {
    float part[4] = {};
    multiply_add<__nv_bfloat16>(part, w.first, x.x, x.y);
    multiply_add<__nv_bfloat16>(part, w.second, x.z, x.w);
    sum[0] = __fmaf_rn(w.low_scale, part[0], sum[0]);
    sum[1] = __fmaf_rn(w.low_scale, part[1], sum[1]);
    sum[2] = __fmaf_rn(w.high_scale, part[2], sum[2]);
    sum[3] = __fmaf_rn(w.high_scale, part[3], sum[3]);
  }

 private:
  __device__ static uint2 load_eight(std::uint32_t address) {
    uint2 value;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(address) : "memory");
    return value;
  }
  __device__ static float load_scale(std::uint32_t address) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
    return value;
  }

  const Int8AsBfloat16 wide{};
};

}  // namespace treeattn::kernels::cuda
