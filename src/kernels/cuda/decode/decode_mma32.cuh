// SPDX-License-Identifier: Apache-2.0
// Decode on tensor cores where K and V are float32: the kernel of decode_mma.cuh with another way to fold a piece. The
// tensor cores take float32 with 11 bits (tf32), so a number is two such limbs, and of the four products of two numbers
// that of the lower limbs is left out.
//
// As with bytes (decode_mma8.cuh) the order of the columns is free: a thread loads 16 consecutive bytes of a key. q
// lies in shared memory, each thread's columns of it as it wants them: there are no registers for that.
#pragma once

#include "kernels/cuda/decode/decode_mma.cuh"

namespace treeattn::kernels::cuda {

// Of the bits of a number x: x = high + low, but for 2^-22 of x at most. The upper limb is rounded, of the lower one
// the instruction drops bits.
struct Limbs {
  std::uint32_t high, low;

  __device__ explicit Limbs(std::uint32_t x) {
    high = (x + 0x1000u) & 0xffffe000u;
    low = __float_as_uint(__uint_as_float(x) - __uint_as_float(high));
  }
};

// One warp's part of a leaf. kHalves: 1 for up to 8 rows, 2 for up to 16. A thread has the logits of rows lane / 4 (and
// that plus 8), and of o^T the columns of rows lane % 4 * 2 and one more.
template <int kColumns, int kHalves>
class MmaWarp<float, kColumns, kHalves> {
 public:
  static constexpr int kDim = kColumns, kRows = 8 * kHalves, kHeads = 1, kElementBytes = 4;
  static constexpr int kTile = kDim <= 64 ? 16 : 8;
  static constexpr const char* kName = "mma32";
  static constexpr bool kHandsOver = kRows * kDim == 2048;
  static constexpr bool kBoundByMemory = true;
  static constexpr bool kStartsAtOnce = true;
  static constexpr bool kQueriesAsTheyAre = true;  // it waits for them, but to do so later is no better
  static constexpr int kQueryBytes = kRows * kDim * 4;
  using Copy = PieceCopy<4 * kDim, kTile>;
  using Scales = NoScales;

  __device__ MmaWarp(const AttentionParams& params, const WorkItem& work, int lane_number, std::uint32_t query_address)
      : p(params), item(work), lane(lane_number), queries(query_address), log2_scale(params.scale * merge::kLog2E) {}

  // Of all warps together. Rows that the item does not have repeat its last: nobody reads what becomes of them.
  __device__ void load_queries(int number) const {
#pragma unroll 1
    for (int half = 0; half < kHalves; ++half) {
      const int row = min(lane / 4 + half * 8, item.rows() - 1);
      const std::byte* from = query_row(p, item.batch, query_of(item, row), head_of(p, item, row));
      switch (p.q_dtype) {
        case DType::kBFloat16:
          load_query<__nv_bfloat16>(half, from, number);
          break;
        case DType::kFloat16:
          load_query<__half>(half, from, number);
          break;
        default:
          load_query<float>(half, from, number);
      }
    }
  }

  __device__ void clear() { clear_rows(m, l, o); }

  // Folds a piece that has arrived at `address` into the state. whole: every row sees all its keys.
  __device__ void fold(const Piece& piece, std::uint32_t address, std::uint32_t /*scales*/, bool whole) {
    float s[kEights][4];
    multiply_keys(s, address);
    if (whole && p.softcap == 0 && p.alibi_slopes == nullptr) {
#pragma unroll
      for (int i = 0; i < kEights * 2 * kHalves; ++i) s[i / (2 * kHalves)][i % (2 * kHalves)] *= log2_scale;
    } else {
      special_logits<kHalves>(p, item, lane, s, piece, whole);
    }
    weigh_rows(s, 0.0f, m, l, o, lane);
#pragma unroll
    for (int t = 0; t < kEights; ++t) add_values(s[t], address + Copy::kBytes + t * kEightRows);
  }

  static constexpr int kSteps = kDim / 16, kPairStep = 1;
  // The leaf is done: m, l and o as LeafStates wants them.
  __device__ void settle() { settle_rows(l, o, 1.0f); }
  __device__ int column(int n) const { return value_byte(2 * n / kValueColumns) / 4 + 2 * n % kValueColumns; }
  __device__ static constexpr bool owns(int /*row*/, int /*column*/) { return true; }
  float o[kHalves][kSteps][4];
  float m[kHalves], l[kHalves];  // l: this thread's keys only

 private:
  static constexpr int kEights = kTile / 8;
  static constexpr int kEightRows = 8 * Copy::kPitch;           // bytes
  static constexpr int kKeyLoads = kDim / 16;                   // of 16 bytes; four threads share a key
  static constexpr int kValueBytes = load_bytes(kDim / 8 * 4);  // of one load; eight threads share a value
  static constexpr int kValueColumns = kValueBytes / 4;
  static constexpr int kValueLoads = kDim / 8 / kValueColumns;

  // Which 16-byte unit of a key this thread's load i is. Two consecutive units belong to one thread, so that two keys
  // whose first is loaded at the same time lie in different banks.
  __device__ int key_unit(int i) const {
    return i / 2 * 8 + (i / 2 * 2 + 1 < kKeyLoads ? lane % 4 * 2 + i % 2 : lane % 4);
  }
  // Which byte of a value load i begins with.
  __device__ int value_byte(int i) const { return (i * 8 + lane / 4) * kValueBytes; }

  // Where load i of a row of q lies for this thread.
  __device__ std::uint32_t query_place(int half, int i) const {
    return queries + ((half * kKeyLoads + i) * 32 + lane) * 16;
  }
  // Columns of a row of q in the order of this thread's columns of a key; one load in four is this warp's. Where the
  // row has no more, its last: keys have zeros there.
  //
  // A limb below 2^-126 may be lost. An element of q that could have one, or that makes much of a key's, becomes NaN:
  // then the item is computed again without limbs (docs/exactness.md).
  template <class T>
  __device__ void load_query(int half, const std::byte* from, int number) const {
#pragma unroll 1
    for (int i = number; i < kKeyLoads; i += kMmaWarps) {
      const int column = min(key_unit(i) * 4, p.k.dim - 4);
      const float4 q = four_elements<T>(from + column * static_cast<int>(sizeof(T)));
      store_shared(query_place(half, i),
                   make_float4(with_limbs(q.x), with_limbs(q.y), with_limbs(q.z), with_limbs(q.w)));
    }
  }
  __device__ float with_limbs(float x) const {
    const float most = kMostWithLimbs / fmaxf(1e-30f, fabsf(p.scale));
    return loses_limbs(x) || fabsf(x) > most ? no_unit() : x;
  }

  // s = q K^T. Three sums for eight keys, so that no product waits for more than one before it.
  __device__ void multiply_keys(float (&s)[kEights][4], std::uint32_t address) const {
    float high[kEights][4] = {}, right[kEights][4] = {}, left[kEights][4] = {};
#pragma unroll
    for (int i = 0; i < kKeyLoads; ++i) {
      std::uint32_t q[kHalves][4], k[kEights][4];
#pragma unroll
      for (int half = 0; half < kHalves; ++half) load_shared<16>(q[half], query_place(half, i));
#pragma unroll
      for (int t = 0; t < kEights; ++t) {
        load_shared<16>(k[t], address + t * kEightRows + Copy::offset(lane / 4, key_unit(i)));
      }
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        std::uint32_t a_high[4] = {}, a_low[4] = {};
#pragma unroll
        for (int part = 0; part < 2 * kHalves; ++part) {
          const int half = part % kHalves, column = part / kHalves;
          const Limbs a(q[half][j + column]);
          a_high[2 * column + half] = a.high;
          a_low[2 * column + half] = a.low;
        }
#pragma unroll
        for (int t = 0; t < kEights; ++t) {
          const Limbs b0(k[t][j]), b1(k[t][j + 1]);
          multiply_add_tf32(high[t], a_high, b0.high, b1.high);
          multiply_add_tf32(right[t], a_high, b0.low, b1.low);
          multiply_add_tf32(left[t], a_low, b0.high, b1.high);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4 * kEights; ++i)
      s[i / 4][i % 4] = high[i / 4][i % 4] + (right[i / 4][i % 4] + left[i / 4][i % 4]);
  }

  // o += weights * V of eight keys. The first four of the product are the even ones: a thread has the weights of keys
  // lane % 4 * 2 and one more.
  __device__ void add_values(const float (&s)[4], std::uint32_t address) {
#pragma unroll
    for (int i = 0; i < kValueLoads; ++i) {
      std::uint32_t words[2][kValueColumns];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int byte = value_byte(i);
        load_shared<kValueBytes>(words[j], address + Copy::offset(lane % 4 * 2 + j, byte / 16) + byte % 16);
      }
#pragma unroll
      for (int c = 0; c < kValueColumns; c += 2) {
        std::uint32_t v_high[4], v_low[4];
#pragma unroll
        for (int part = 0; part < 4; ++part) {
          const Limbs v(words[part / 2][c + part % 2]);
          v_high[part] = v.high;
          v_low[part] = v.low;
        }
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          const Limbs even(__float_as_uint(s[2 * half])), odd(__float_as_uint(s[2 * half + 1]));
          float(&sum)[4] = o[half][(i * kValueColumns + c) / 2];
          multiply_add_tf32(sum, v_high, even.low, odd.low);
          multiply_add_tf32(sum, v_low, even.high, odd.high);
          multiply_add_tf32(sum, v_high, even.high, odd.high);
        }
      }
    }
  }

  const AttentionParams& p;
  const WorkItem& item;
  const int lane;
  const std::uint32_t queries;  // [halves, loads of a key, 32, 4] in shared memory
  const float log2_scale;
};

}  // namespace treeattn::kernels::cuda
