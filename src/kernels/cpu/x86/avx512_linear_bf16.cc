// SPDX-License-Identifier: Apache-2.0
// Linear maps with bfloat16 weights by VDPBF16PS, which adds the products of two pairs to each of 16 floats. x is
// rounded to bfloat16. The instruction rounds every addition to nearest even and takes subnormal numbers for zero.
//
// The order of the sum: the columns are cut into runs of 32, of which every lane has two. A lane is one chain of
// additions over the runs, whichever rows are worked on together; the lanes are added at the end.
#include "kernels/cpu/targets.h"
#include "kernels/cpu/x86/avx512_vectors.h"

namespace treeattn::kernels {
namespace {

using linear_loops::smaller;

constexpr std::int64_t kRun = 32;
constexpr std::int64_t kRowsAtOnce = 32;  // of x: they stay in the second-level cache while the weights pass by

using Words = std::uint16_t;

std::size_t row_bytes(std::int64_t cols) { return static_cast<std::size_t>((cols + kRun - 1) / kRun) * 64; }

void pack_row(const float* x, int, std::int64_t cols, std::byte* packed) {
  for (std::int64_t col = 0; col < cols; col += kRun, packed += 64) {
    _mm512_store_si512(packed, avx512::to_bfloat16(x + col, cols - col));
  }
}

__m512 add_products(__m512 sum, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

// Rows [row, row + R) of x against rows first, first + distance, ... of the weights, N (1 or 4) of them.
template <int R, int N>
void multiply_rows(const LinearArgs& args, std::int64_t row, std::int64_t first, std::int64_t distance) {
  const auto stride = static_cast<std::int64_t>(row_bytes(args.cols));
  const std::byte* x = args.x + row * stride;
  const Words* w[N];
  __m512 sums[R][N];
  TREEATTN_UNROLL
  for (int n = 0; n < N; ++n) {
    w[n] = reinterpret_cast<const Words*>(args.w) + (first + n * distance) * args.cols;
    TREEATTN_UNROLL
    for (int r = 0; r < R; ++r) sums[r][n] = _mm512_setzero_ps();
  }
  const auto add_run = [&](std::int64_t col, auto load) __attribute__((always_inline)) {
    __m512i weights[N];
    TREEATTN_UNROLL
    for (int n = 0; n < N; ++n) weights[n] = load(w[n] + col);
    TREEATTN_UNROLL
    for (int r = 0; r < R; ++r) {
      const __m512i of_x = _mm512_load_si512(x + r * stride + col * 2);
      TREEATTN_UNROLL
      for (int n = 0; n < N; ++n) sums[r][n] = add_products(sums[r][n], of_x, weights[n]);
    }
  };
  std::int64_t col = 0;
  for (; col + kRun <= args.cols; col += kRun) add_run(col, [](const Words* p) { return _mm512_loadu_si512(p); });
  if (col < args.cols) {
    add_run(col, [&](const Words* p) { return avx512::load_bytes(p, (args.cols - col) * 2); });
  }
  TREEATTN_UNROLL
  for (int r = 0; r < R; ++r) {
    alignas(16) float total[4];
    _mm_store_ps(total, avx512::sums_of_lanes(sums[r][0], sums[r][1 % N], sums[r][2 % N], sums[r][3 % N]));
    float* y = args.y + (row + r) * args.y_stride + first;
    TREEATTN_UNROLL
    for (int n = 0; n < N; ++n) linear_loops::put(y + n * distance, total[n], args.add);
  }
}

template <int N>
void multiply_all_rows(const LinearArgs& args, std::int64_t row, std::int64_t end, std::int64_t first) {
  for (; row + 4 <= end; row += 4) multiply_rows<4, N>(args, row, first, 1);
  for (; row < end; ++row) multiply_rows<1, N>(args, row, first, 1);
}

void multiply(const LinearArgs& args) {
  if (args.rows == 1) {
    return linear_loops::for_each_stream_step(
        args, [&]<int N>(std::int64_t first, std::int64_t distance) { multiply_rows<1, N>(args, 0, first, distance); });
  }
  for (std::int64_t row = 0; row < args.rows; row += kRowsAtOnce) {
    const std::int64_t end = smaller(row + kRowsAtOnce, args.rows);
    std::int64_t n = args.begin;
    for (; n + 4 <= args.end; n += 4) multiply_all_rows<4>(args, row, end, n);
    for (; n < args.end; ++n) multiply_all_rows<1>(args, row, end, n);
  }
}

}  // namespace

void use_avx512_linear_bf16(ModelKernels& kernels) {
  kernels.linear[static_cast<int>(DType::kBFloat16)] = {
      Activations::kBFloat16, 1, 4, row_bytes, pack_row, multiply, 0x1p-24, true};
}

}  // namespace treeattn::kernels
