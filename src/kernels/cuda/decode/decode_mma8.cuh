// SPDX-License-Identifier: Apache-2.0
// Decode on tensor cores where K and V are 8-bit numbers with a scale a row: the kernel of decode_mma.cuh with another
// way to fold a piece. Elements become float16 in registers, exactly, or stay bytes where q is cut into bytes
// (byte_queries.cuh). A key's scale multiplies its logits, a value's its weights, which are two float16 limbs of a unit
// that follows the largest of them.
//
// Columns are summed over, so their order is free as long as both factors have the same: a thread loads up to 16
// consecutive bytes of a key and they serve several products. Likewise the columns of o, which `store` puts in order.
//
// Heads of 64 columns that lie side by side are taken two at a time: rows of 128 bytes come from memory faster than
// rows of 64. A row is multiplied with the keys and values of both heads, and of the products its own are selected. The
// tensor cores work no longer for that: the rows of the other head would be empty.
#pragma once

#include <type_traits>

#include "kernels/cuda/decode/byte_queries.cuh"
#include "kernels/cuda/decode/decode_mma.cuh"

namespace treeattn::kernels::cuda {

// One warp's part of a leaf. kHalves: 1 for up to 8 rows, 2 for up to 16 and queries that one limb holds. A thread has
// the logits of rows lane / 4 (and that plus 8), and of o^T the columns of rows lane % 4 * 2 and one more. kKvHeads:
// KV heads of an item, side by side, 1 or 2.
template <class Bytes, int kColumns, int kHalves, int kKvHeads = 1>
class Mma8Warp {
 public:
  static constexpr int kDim = kColumns, kRows = 8 * kHalves, kHeads = kKvHeads, kElementBytes = 1;
  static constexpr int kWidth = kHeads * kDim;                               // columns of a row of the piece
  static constexpr int kTile = kWidth <= 64 ? 64 : kWidth <= 128 ? 32 : 16;  // as many keys as make 8 KiB of K and V
  static constexpr const char* kName = "mma8";
  static constexpr bool kHandsOver = kRows == 16 && kDim == 128;
  static constexpr bool kBoundByMemory = false;                       // conversions and scales keep it busy as well
  static constexpr bool kStartsAtOnce = kHalves == 1 || kHeads == 2;  // else there are no registers to spare for it
  static constexpr bool kQueriesAsTheyAre = false;
  static constexpr int kQueryBytes = 0;
  using Copy = PieceCopy<kWidth, kTile>;
  using Scales = PieceScales<kTile, kHeads>;

  __device__ Mma8Warp(const AttentionParams& params, const WorkItem& work, int lane_number, std::uint32_t /*queries*/)
      : p(params), item(work), lane(lane_number) {
    if (kHeads == 2) rows_of_second = __ballot_sync(~0u, lane % item.heads >= p.heads_per_kv);
#pragma unroll
    for (int i = 0; i < kKeyLoads; ++i) key_offset[i] = byte_offset(lane / 4, key_byte(i));
#pragma unroll
    for (int i = 0; i < kValueLoads; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) value_offset[i][j] = byte_offset(lane % 4 * 2 + j, (i * 8 + lane / 4) * kValueBytes);
    }
  }

  // Rows that the item does not have repeat its last: nobody reads what becomes of them.
  __device__ void load_queries(int /*number*/) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int row = min(lane / 4 + half * 8, item.rows() - 1);
      const std::byte* from = query_row(p, item.batch, query_of(item, row), head_of(p, item, row));
      switch (p.q_dtype) {
        case DType::kBFloat16:
          load_query<__nv_bfloat16>(half, from);
          break;
        case DType::kFloat16:
          load_query<__half>(half, from);
          break;
        default:
          load_query<float>(half, from);
      }
      logit_unit[half] = q.unit[half] * (p.scale * merge::kLog2E);
    }
  }

  __device__ void clear() {
    clear_rows(m, l, o);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      largest[half] = 0.0f;
      unit[half] = 0x1p14f;  // right for weights without a scale
    }
  }

  // Folds a piece that has arrived at `address`, with scales, into the state. whole: every row sees all its keys.
  __device__ void fold(const Piece& piece, std::uint32_t address, std::uint32_t scales, bool whole) {
    float s[kEights][4];
    multiply_keys(s, address);
    const bool plain = whole && p.softcap == 0 && p.alibi_slopes == nullptr;
#pragma unroll
    for (int t = 0; t < kEights; ++t) {
      float2 of_key[kHalves];
      load_scales(of_key, scales, t);
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const float of_row = plain ? logit_unit[half] : q.unit[half];
        s[t][2 * half] = s[t][2 * half] * of_row * of_key[half].x;
        s[t][2 * half + 1] = s[t][2 * half + 1] * of_row * of_key[half].y;
      }
    }
    if (!plain) special_logits<kHalves>(p, item, lane, s, piece, whole);
    weigh(s, scales + Scales::kCount * 4);
    add_values(s, address + Copy::kBytes);
  }

  static constexpr int kSteps = kWidth / 16, kPairStep = 1;
  // The leaf is done: m, l and o as LeafStates wants them.
  __device__ void settle() {
    settle_rows(l, o, 1.0f);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) multiply_columns(o[half], inverse_power(unit[half]), lane);
  }
  __device__ int column(int n) const {
    return (2 * n / kValueBytes * 8 + lane / 4) * kValueBytes + 2 * n % kValueBytes;
  }
  __device__ bool owns(int row, int column) const { return kHeads == 1 || column / kDim == head_of_row(row); }
  float o[kHalves][kSteps][4];   // times unit; of two heads, those of the other are not used
  float m[kHalves], l[kHalves];  // l: this thread's keys only

 private:
  static constexpr int kKeySteps = kDim / 16;
  using Query = std::conditional_t<std::is_same_v<Bytes, Int8Bytes> && kHalves == 1, FixedQuery<kKeySteps>,
                                   HalfQuery<Bytes, kKeySteps, kHalves>>;
  static constexpr int kEights = kTile / 8;
  static constexpr int kKeyBytes = load_bytes(kDim / 4);  // of one load of a key; four threads share a key
  static constexpr int kKeyWords = kKeyBytes / 4;
  static constexpr int kKeyLoads = kWidth / 4 / kKeyBytes, kHeadLoads = kKeyLoads / kHeads;
  static constexpr int kValueBytes = load_bytes(kWidth / 8);  // likewise; eight threads share a value
  static constexpr int kValueLoads = kWidth / 8 / kValueBytes;
  static constexpr int kEightRows = 8 * Copy::kPitch;  // bytes
  static_assert(kHeads == 1 || kWidth == 128);

  // Which byte of a key this thread's load i begins with. Two consecutive units of 16 bytes belong to one thread: so
  // two keys whose first unit is loaded at the same time lie in different banks. Of two heads, which share a line of
  // 128 bytes, odd keys begin with the second for the same reason.
  __device__ int key_byte(int i) const {
    constexpr int kRun = kKeyBytes == 16 && kHeadLoads > 1 ? 2 : 1;
    const int head = i / kHeadLoads ^ (kHeads == 2 ? lane / 4 % 2 : 0), load = i % kHeadLoads;
    return head * kDim + (load / kRun * 4 * kRun + lane % 4 * kRun + load % kRun) * kKeyBytes;
  }
  // Which of two heads a row of the item belongs to.
  __device__ int head_of_row(int row) const { return static_cast<int>(rows_of_second >> row & 1); }
  // Where a byte of a row lies.
  __device__ static std::uint32_t byte_offset(int row, int byte) { return Copy::offset(row, byte / 16) + byte % 16; }

  // Columns of a row of q in the order of this thread's words of a key. Where the row has no more, its last: keys have
  // zeros there.
  template <class T>
  __device__ void load_query(int half, const std::byte* from) {
    q.load(half, [&](int step) {
      const int column = key_byte(step / kKeyWords) % kDim + step % kKeyWords * 4;
      return four_elements<T>(from + min(column, p.k.dim - 4) * static_cast<int>(sizeof(T)));
    });
  }

  // s = q K^T.
  __device__ void multiply_keys(float (&s)[kEights][4], std::uint32_t address) const {
    using Sum = typename Query::Sum;
    Sum sums[kHeads][kEights][Query::kParts][4];
#pragma unroll
    for (int first = 0; first < kHeads; ++first) {
      std::uint32_t keys[kEights][kKeySteps];
#pragma unroll
      for (int i = 0; i < kHeadLoads; ++i) {
#pragma unroll
        for (int t = 0; t < kEights; ++t) {
          std::uint32_t words[kKeyWords];
          load_shared<kKeyBytes>(words, address + t * kEightRows + key_offset[first * kHeadLoads + i]);
#pragma unroll
          for (int j = 0; j < kKeyWords; ++j) keys[t][i * kKeyWords + j] = words[j];
        }
      }
      q.multiply(sums[first], keys);
    }
#pragma unroll
    for (int t = 0; t < kEights; ++t) {
      if constexpr (kHeads == 2) select_heads(sums[0][t], sums[1][t]);
      Query::finish(s[t], sums[0][t]);
    }
  }

  // sums becomes what is of the row's own head. The second of a thread's two keys is an odd one: see key_byte.
  template <class Sum, int kParts>
  __device__ void select_heads(Sum (&sums)[kParts][4], const Sum (&others)[kParts][4]) const {
#pragma unroll
    for (int i = 0; i < 4 * kParts; ++i) {
      const int own = head_of_row(lane / 4 + (kHalves == 2 ? i / 2 % 2 * 8 : 0));
      if (own != i % 2) sums[i / 4][i % 4] = others[i / 4][i % 4];
    }
  }

  // The scales of the two keys of this thread among eight, for its rows.
  __device__ void load_scales(float2 (&of)[kHalves], std::uint32_t scales, int eight) const {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      if (kHeads == 1 && half > 0) {
        of[half] = of[0];
        continue;
      }
      std::uint32_t pair[2];
      const int head = kHeads == 1 ? 0 : head_of_row(lane / 4 + 8 * half);
      load_shared<8>(pair, scales + Scales::offset(eight, head) + lane % 4 * 8);
      of[half] = make_float2(__uint_as_float(pair[0]), __uint_as_float(pair[1]));
    }
  }

  // Logits become weights times value scales, in units of 1 / unit; m, l and o move to the new maximum, and o to the
  // new unit.
  __device__ void weigh(float (&s)[kEights][4], std::uint32_t value_scales) {
    float factor[kHalves], top[kHalves];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      factor[half] = weigh_row(s, half, 0.0f, m[half], l[half]);
      top[half] = 0.0f;
    }
#pragma unroll
    for (int t = 0; t < kEights; ++t) {
      float2 of_value[kHalves];
      load_scales(of_value, value_scales, t);
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        s[t][2 * half] *= of_value[half].x;
        s[t][2 * half + 1] *= of_value[half].y;
        top[half] = fmaxf(top[half], fmaxf(fabsf(s[t][2 * half]), fabsf(s[t][2 * half + 1])));
      }
    }
    bool moved = false;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      top[half] = fmaxf(top[half], __shfl_xor_sync(~0u, top[half], 1));
      top[half] = fmaxf(top[half], __shfl_xor_sync(~0u, top[half], 2));
      largest[half] = fmaxf(largest[half] * factor[half], top[half]);
      const float size = largest[half] * unit[half];
      if (largest[half] > 0.0f && !(size >= 1.0f && size <= 0x1p15f)) {
        const float next = power_of_two(min(127 + 13 + 127 - exponent_of(largest[half]), 253));
        factor[half] *= next * inverse_power(unit[half]);
        unit[half] = next;
      }
      moved = moved || factor[half] != 1.0f;
#pragma unroll
      for (int t = 0; t < kEights; ++t) {
        s[t][2 * half] *= unit[half];
        s[t][2 * half + 1] *= unit[half];
      }
    }
    if (__any_sync(~0u, moved)) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) multiply_columns(o[half], factor[half], lane);
    }
  }

  // o += weights * V, 16 keys at a time.
  __device__ void add_values(const float (&s)[kEights][4], std::uint32_t address) {
#pragma unroll
    for (int t = 0; t < kEights; t += 2) {
      std::uint32_t high[kHalves][2], low[kHalves][2];
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float a = s[t + i][2 * half], b = s[t + i][2 * half + 1];
          high[half][i] = take_limbs<__half>(a, b);
          low[half][i] = pack<__half>(a, b);
        }
      }
#pragma unroll
      for (int i = 0; i < kValueLoads; ++i) {
        std::uint32_t words[2][2][kValueWords];  // of keys of either eight: the even one, the odd one
#pragma unroll
        for (int e = 0; e < 2; ++e) {
#pragma unroll
          for (int j = 0; j < 2; ++j)
            load_shared<kValueBytes>(words[e][j], address + (t + e) * kEightRows + value_offset[i][j]);
        }
        add_columns(i * kValueBytes / 2, words, high, low);
      }
    }
  }

  // The columns of one load, from product number `first` on. Several at once: the second product of a column must not
  // wait for the first.
  static constexpr int kValueWords = (kValueBytes + 3) / 4;
  __device__ void add_columns(int first, const std::uint32_t (&words)[2][2][kValueWords],
                              const std::uint32_t (&high)[kHalves][2], const std::uint32_t (&low)[kHalves][2]) {
    constexpr int kProducts = kValueBytes / 2, kBatch = kProducts < 4 ? kProducts : 4;
#pragma unroll
    for (int n = 0; n < kProducts; n += kBatch) {
      std::uint32_t v[kBatch][4];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const std::uint32_t even = words[e][0][(n + i) / 2], odd = words[e][1][(n + i) / 2];
          const std::uint32_t both =
              (n + i) % 2 == 0 ? Bytes::template pair_up<0>(even, odd) : Bytes::template pair_up<1>(even, odd);
          Bytes::widen(both, v[i][2 * e], v[i][2 * e + 1]);
        }
      }
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
          multiply_add<__half>(o[half][first + n + i], v[i], high[half][0], high[half][1]);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) multiply_add<__half>(o[half][first + n + i], v[i], low[half][0], low[half][1]);
      }
    }
  }

  const AttentionParams& p;
  const WorkItem& item;
  const int lane;
  std::uint32_t key_offset[kKeyLoads];         // of this thread's loads of the first eight keys
  std::uint32_t value_offset[kValueLoads][2];  // of two values
  Query q;
  float logit_unit[kHalves];    // a product of q is in units of that, once it is a logit
  unsigned rows_of_second = 0;  // a bit for each row: of the second of two heads
  float largest[kHalves];       // of the weights times value scales so far, relative to m
  float unit[kHalves];          // a power of two; largest * unit lies in [1, 2^15]
};

// The kernel for head dim kDim and items of at most `rows` rows.
template <class Bytes, int kDim, int kHeads = 1>
Launch decode_mma8_of_dim(int rows) {
  constexpr int kStages = 2;  // 64 KiB on their way to a block
  if constexpr (kDim <= 128) {
    if (rows > 8) return decode_mma_launch<Mma8Warp<Bytes, kDim, 2, kHeads>, kStages>(rows);
  }
  return decode_mma_launch<Mma8Warp<Bytes, kDim, 1, kHeads>, kStages>(rows);
}

// The same for any head dim; kernel is null where there is none. Each type is compiled in a file of its own.
template <class Bytes>
Launch decode_mma8_launch(int dim, int rows, bool two_heads) {
  if (two_heads) return decode_mma8_of_dim<Bytes, 64, 2>(rows);
  return for_head_dim(dim, [&](auto fixed) { return decode_mma8_of_dim<Bytes, fixed.value>(rows); });
}

}  // namespace treeattn::kernels::cuda
