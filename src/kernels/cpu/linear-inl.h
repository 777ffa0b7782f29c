// SPDX-License-Identifier: Apache-2.0
// Per target: linear maps as dot products of rows, the lanes of a vector being columns. Each element of y has one
// vector of sums, whose lanes are added at the end. Weights of 16 bits are widened to float32, which is exact; int8
// weights are multiplied with int8 groups of x, in integers within a group.
#if defined(TREEATTN_LINEAR_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TREEATTN_LINEAR_INL_H_
#undef TREEATTN_LINEAR_INL_H_
#else
#define TREEATTN_LINEAR_INL_H_
#endif

#include <cstring>

#include "kernels/cpu/dot-inl.h"
#include "kernels/cpu/model_kernels.h"
#include "kernels/cpu/rows-inl.h"
#include "kernels/model_ops.h"

HWY_BEFORE_NAMESPACE();
namespace treeattn::kernels {
namespace HWY_NAMESPACE {

inline constexpr int kWeightRows = 4;               // worked on together
inline constexpr std::int64_t kLinearDepth = 1024;  // columns worked on before the next ones, where there are many rows
inline constexpr std::int64_t kWidenFromRows = 4;   // widening a block of weights once pays from here
// So far ahead weights are fetched that are read once, on x86 (fetch_line): each of the four rows its own.
inline constexpr std::ptrdiff_t kWeightBytesAhead = 512;

HWY_INLINE std::int64_t float_lanes() { return static_cast<std::int64_t>(hn::Lanes(hn::ScalableTag<float>())); }
HWY_INLINE std::int64_t whole_vectors(std::int64_t cols) {
  return (cols + float_lanes() - 1) / float_lanes() * float_lanes();
}
HWY_INLINE std::size_t whole_lines(std::int64_t bytes) { return static_cast<std::size_t>((bytes + 63) / 64 * 64); }

// A row of x, with zeros up to whole vectors.
inline std::size_t float_tile_bytes(std::int64_t cols) { return whole_lines(whole_vectors(cols) * 4); }
inline void pack_float_tile(const float* x, int, std::int64_t cols, std::byte* packed) {
  std::memcpy(packed, x, static_cast<std::size_t>(cols) * sizeof(float));
  float* out = reinterpret_cast<float*>(packed);
  for (std::int64_t i = cols; i < whole_vectors(cols); ++i) out[i] = 0.0f;
}

// Four rows of weights, at some column.
template <class T>
struct WeightRows {
  const T* row[kWeightRows];
  WeightRows at(std::int64_t col) const { return {{row[0] + col, row[1] + col, row[2] + col, row[3] + col}}; }
};

// `count` columns of each as float32, zeros up to whole vectors; rows of `out` are kLinearDepth apart.
template <class T>
HWY_INLINE WeightRows<float> widen(const WeightRows<T>& w, std::int64_t count, float* out) {
  const hn::ScalableTag<float> df;
  const std::int64_t lanes = float_lanes();
  for (int n = 0; n < kWeightRows; ++n, out += kLinearDepth) {
    std::int64_t i = 0;
    for (; i + lanes <= count; i += lanes) hn::StoreU(load_f32(df, w.row[n] + i), df, out + i);
    if (i == count) continue;
    HWY_ALIGN T rest[hn::MaxLanes(df)] = {};
    for (std::int64_t j = i; j < count; ++j) rest[j - i] = w.row[n][j];
    hn::StoreU(load_f32(df, rest), df, out + i);
  }
  out -= kWeightRows * kLinearDepth;
  return {{out, out + kLinearDepth, out + 2 * kLinearDepth, out + 3 * kLinearDepth}};
}

// sums [R][4] vectors += R rows of x times four rows of weights, over `count` columns, a multiple of the lanes. Vectors
// of unknown size cannot sit in arrays, hence the names: a<row of x><row of weights>.
template <int R, class T>
HWY_INLINE void add_products(const float* x, std::int64_t stride, std::int64_t count, const WeightRows<T>& w,
                             float* HWY_RESTRICT sums) {
  const hn::ScalableTag<float> df;
  const std::int64_t lanes = float_lanes();
  const auto at = [&](int row, int n) HWY_ATTR { return sums + (row * kWeightRows + n) * lanes; };
  auto a00 = hn::Load(df, at(0, 0)), a01 = hn::Load(df, at(0, 1)), a02 = hn::Load(df, at(0, 2));
  auto a03 = hn::Load(df, at(0, 3)), a10 = hn::Zero(df), a11 = a10, a12 = a10, a13 = a10;
  auto a20 = a10, a21 = a10, a22 = a10, a23 = a10, a30 = a10, a31 = a10, a32 = a10, a33 = a10;
  if constexpr (R > 1) {
    a10 = hn::Load(df, at(1, 0)), a11 = hn::Load(df, at(1, 1)), a12 = hn::Load(df, at(1, 2));
    a13 = hn::Load(df, at(1, 3));
  }
  if constexpr (R > 2) {
    a20 = hn::Load(df, at(2, 0)), a21 = hn::Load(df, at(2, 1)), a22 = hn::Load(df, at(2, 2));
    a23 = hn::Load(df, at(2, 3)), a30 = hn::Load(df, at(3, 0)), a31 = hn::Load(df, at(3, 1));
    a32 = hn::Load(df, at(3, 2)), a33 = hn::Load(df, at(3, 3));
  }
  for (std::int64_t i = 0; i < count; i += lanes) {
    if constexpr (R <= 2) {
      fetch_with<1>(df, kWeightBytesAhead, static_cast<int>(i), w.row[0], w.row[1], w.row[2], w.row[3]);
    }
    const auto w0 = load_f32(df, w.row[0] + i), w1 = load_f32(df, w.row[1] + i);
    const auto w2 = load_f32(df, w.row[2] + i), w3 = load_f32(df, w.row[3] + i);
    const auto x0 = hn::LoadU(df, x + i);
    a00 = hn::MulAdd(x0, w0, a00), a01 = hn::MulAdd(x0, w1, a01);
    a02 = hn::MulAdd(x0, w2, a02), a03 = hn::MulAdd(x0, w3, a03);
    if constexpr (R > 1) {
      const auto x1 = hn::LoadU(df, x + stride + i);
      a10 = hn::MulAdd(x1, w0, a10), a11 = hn::MulAdd(x1, w1, a11);
      a12 = hn::MulAdd(x1, w2, a12), a13 = hn::MulAdd(x1, w3, a13);
    }
    if constexpr (R > 2) {
      const auto x2 = hn::LoadU(df, x + 2 * stride + i);
      a20 = hn::MulAdd(x2, w0, a20), a21 = hn::MulAdd(x2, w1, a21);
      a22 = hn::MulAdd(x2, w2, a22), a23 = hn::MulAdd(x2, w3, a23);
      const auto x3 = hn::LoadU(df, x + 3 * stride + i);
      a30 = hn::MulAdd(x3, w0, a30), a31 = hn::MulAdd(x3, w1, a31);
      a32 = hn::MulAdd(x3, w2, a32), a33 = hn::MulAdd(x3, w3, a33);
    }
  }
  hn::Store(a00, df, at(0, 0)), hn::Store(a01, df, at(0, 1));
  hn::Store(a02, df, at(0, 2)), hn::Store(a03, df, at(0, 3));
  if constexpr (R > 1) {
    hn::Store(a10, df, at(1, 0)), hn::Store(a11, df, at(1, 1));
    hn::Store(a12, df, at(1, 2)), hn::Store(a13, df, at(1, 3));
  }
  if constexpr (R > 2) {
    hn::Store(a20, df, at(2, 0)), hn::Store(a21, df, at(2, 1)), hn::Store(a22, df, at(2, 2));
    hn::Store(a23, df, at(2, 3)), hn::Store(a30, df, at(3, 0)), hn::Store(a31, df, at(3, 1));
    hn::Store(a32, df, at(3, 2)), hn::Store(a33, df, at(3, 3));
  }
}

// The same for all rows of x from column `col` on.
template <class T>
HWY_INLINE void add_columns(const LinearArgs& args, std::int64_t col, std::int64_t count, const WeightRows<T>& w,
                            float* sums) {
  const auto stride = static_cast<std::int64_t>(float_tile_bytes(args.cols) / sizeof(float));
  const float* x = reinterpret_cast<const float*>(args.x) + col;
  const std::int64_t sums_of_row = kWeightRows * float_lanes();
  std::int64_t r = 0;
  if constexpr (kRegisterRows >= 4) {
    for (; r + 4 <= args.rows; r += 4) add_products<4>(x + r * stride, stride, count, w, sums + r * sums_of_row);
  }
  for (; r + 2 <= args.rows; r += 2) add_products<2>(x + r * stride, stride, count, w, sums + r * sums_of_row);
  if (r < args.rows) add_products<1>(x + r * stride, stride, count, w, sums + r * sums_of_row);
}

// sums [rows][4] vectors: adds the lanes. y of row n[i] of the weights, for i < count.
HWY_INLINE void put_sums(const LinearArgs& args, const float* sums, const std::int64_t (&n)[kWeightRows], int count) {
  const hn::ScalableTag<float> df;
  const std::int64_t lanes = float_lanes();
  HWY_ALIGN float total[4];
  for (std::int64_t r = 0; r < args.rows; ++r, sums += kWeightRows * lanes) {
    store_sums4(df, hn::Load(df, sums), hn::Load(df, sums + lanes), hn::Load(df, sums + 2 * lanes),
                hn::Load(df, sums + 3 * lanes), total);
    float* y = args.y + r * args.y_stride;
    for (int i = 0; i < count; ++i) y[n[i]] = args.add ? y[n[i]] + total[i] : total[i];
  }
}

// body(rows of weights, how many of the four count): those of the four streams that the call names
// (LinearArgs::stream), else as they lie.
template <class Body>
HWY_INLINE void for_each_four(const LinearArgs& args, const Body& body) {
  std::int64_t n = args.begin;
  if (args.stream > 0) {
    for (; n < args.end; ++n) {
      body({n, n + args.stream, n + 2 * args.stream, n + 3 * args.stream}, kWeightRows);
    }
    return;
  }
  for (; n + kWeightRows <= args.end; n += kWeightRows) body({n, n + 1, n + 2, n + 3}, kWeightRows);
  const std::int64_t last = args.end - 1;
  if (n < args.end) {
    body({n, HWY_MIN(n + 1, last), HWY_MIN(n + 2, last), last}, static_cast<int>(args.end - n));
  }
}

template <class T>
HWY_INLINE void multiply_float_rows(const LinearArgs& args) {
  const std::int64_t lanes = float_lanes(), whole = args.cols / lanes * lanes;
  const bool widened = sizeof(T) < sizeof(float) && args.rows >= kWidenFromRows;
  const std::int64_t depth = args.rows >= kWidenFromRows ? kLinearDepth : args.cols;
  float* block = reinterpret_cast<float*>(args.scratch);
  float* sums = block + kWeightRows * kLinearDepth;
  for_each_four(args, [&](const std::int64_t(&n)[kWeightRows], int count) HWY_ATTR {
    const T* data = reinterpret_cast<const T*>(args.w);
    const WeightRows<T> w{
        {data + n[0] * args.cols, data + n[1] * args.cols, data + n[2] * args.cols, data + n[3] * args.cols}};
    std::memset(sums, 0, sizeof(float) * static_cast<std::size_t>(args.rows * kWeightRows * lanes));
    for (std::int64_t col = 0; col < whole; col += depth) {
      const std::int64_t columns = HWY_MIN(depth, whole - col);
      if (widened) {
        add_columns(args, col, columns, widen(w.at(col), columns, block), sums);
      } else {
        add_columns(args, col, columns, w.at(col), sums);
      }
    }
    if (whole < args.cols) {
      add_columns(args, whole, lanes, widen(w.at(whole), args.cols - whole, block), sums);
    }
    put_sums(args, sums, n, count);
  });
}

// A few rows of x at a time, so that they stay in the second-level cache while all the weights pass by.
template <class T>
void multiply_floats(const LinearArgs& args) {
  constexpr std::int64_t kRows = 32;
  for (std::int64_t row = 0; row < args.rows; row += kRows) {
    LinearArgs some = args;
    some.x += row * static_cast<std::int64_t>(float_tile_bytes(args.cols));
    some.y += row * args.y_stride;
    some.rows = HWY_MIN(kRows, args.rows - row);
    multiply_float_rows<T>(some);
  }
}

// int8. A row of x: its values as int16, then its scales.
inline std::size_t int8_tile_bytes(std::int64_t cols) { return whole_lines(cols * 2 + cols / kWeightGroup * 4); }
inline void pack_int8_tile(const float* x, int, std::int64_t cols, std::byte* packed) {
  std::int16_t* values = reinterpret_cast<std::int16_t*>(packed);
  float* scales = reinterpret_cast<float*>(values + cols);
  for (std::int64_t col = 0; col < cols; col += kWeightGroup) {
    std::int8_t group[kWeightGroup];
    quantize<float>(reinterpret_cast<const std::byte*>(x + col), 1, group, &scales[col / kWeightGroup]);
    for (std::int64_t i = 0; i < kWeightGroup; ++i) values[col + i] = group[i];
  }
}

// The sum over a group, spread over lanes, as floats: exact, being an integer below 2^24.
template <class D16, class DF>
HWY_INLINE hn::Vec<DF> group_sum(D16 d16, DF df, const std::int16_t* x, const std::int8_t* w) {
  const hn::RebindToSigned<DF> d32;
  const hn::Rebind<std::int8_t, D16> d8;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d16));
  auto low = hn::Zero(d32), high = hn::Zero(d32);
  for (std::int64_t i = 0; i < kWeightGroup; i += lanes) {
    low =
        hn::ReorderWidenMulAccumulate(d32, hn::LoadU(d16, x + i), hn::PromoteTo(d16, hn::LoadU(d8, w + i)), low, high);
  }
  return hn::ConvertTo(df, hn::Add(low, high));
}

// One row of x against four rows of weights.
HWY_INLINE void multiply_int8_row(const LinearArgs& args, std::int64_t row, const std::int64_t (&n)[kWeightRows],
                                  float* total) {
  const hn::CappedTag<std::int16_t, kWeightGroup> d16;
  const hn::Repartition<float, decltype(d16)> df;
  const std::int64_t groups = args.cols / kWeightGroup;
  const std::byte* packed = args.x + row * static_cast<std::int64_t>(int8_tile_bytes(args.cols));
  const std::int16_t* x = reinterpret_cast<const std::int16_t*>(packed);
  const float* of_x = reinterpret_cast<const float*>(x + args.cols);
  const std::int8_t* data = reinterpret_cast<const std::int8_t*>(args.w);
  const std::int8_t *w0 = data + n[0] * args.cols, *w1 = data + n[1] * args.cols;
  const std::int8_t *w2 = data + n[2] * args.cols, *w3 = data + n[3] * args.cols;
  const float *s0 = args.scales + n[0] * groups, *s1 = args.scales + n[1] * groups;
  const float *s2 = args.scales + n[2] * groups, *s3 = args.scales + n[3] * groups;
  auto a0 = hn::Zero(df), a1 = a0, a2 = a0, a3 = a0;
  for (std::int64_t g = 0; g < groups; ++g) {
    const std::int64_t col = g * kWeightGroup;
    if (col % 64 == 0) fetch_line(kWeightBytesAhead, static_cast<int>(col), w0, w1, w2, w3);
    a0 = hn::MulAdd(group_sum(d16, df, x + col, w0 + col), hn::Set(df, of_x[g] * s0[g]), a0);
    a1 = hn::MulAdd(group_sum(d16, df, x + col, w1 + col), hn::Set(df, of_x[g] * s1[g]), a1);
    a2 = hn::MulAdd(group_sum(d16, df, x + col, w2 + col), hn::Set(df, of_x[g] * s2[g]), a2);
    a3 = hn::MulAdd(group_sum(d16, df, x + col, w3 + col), hn::Set(df, of_x[g] * s3[g]), a3);
  }
  store_sums4(df, a0, a1, a2, a3, total);
}

inline void multiply_int8(const LinearArgs& args) {
  for_each_four(args, [&](const std::int64_t(&n)[kWeightRows], int count) HWY_ATTR {
    for (std::int64_t r = 0; r < args.rows; ++r) {
      HWY_ALIGN float total[4];
      multiply_int8_row(args, r, n, total);
      float* y = args.y + r * args.y_stride;
      for (int i = 0; i < count; ++i) y[n[i]] = args.add ? y[n[i]] + total[i] : total[i];
    }
  });
}

template <class T>
constexpr LinearOps float_linear() {
  return {Activations::kFloat32, 1, 4, float_tile_bytes, pack_float_tile, multiply_floats<T>, 0x1p-24, false};
}
constexpr LinearOps int8_linear() {
  return {Activations::kInt8Groups, 1, 4, int8_tile_bytes, pack_int8_tile, multiply_int8, 0x1p-24, false};
}

}  // namespace HWY_NAMESPACE
}  // namespace treeattn::kernels
HWY_AFTER_NAMESPACE();

#endif
