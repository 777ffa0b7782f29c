// SPDX-License-Identifier: Apache-2.0
// Linear maps with int8 weights by TDPBSSD, which multiplies 16 rows of weights with 16 rows of x, a group at a time;
// the scales of the group are put to the integers by vectors. One row of x is left to VPDPBUSD. Both make the same
// integers and add the groups in the same order (avx512_linear_int8.h).
#include "kernels/cpu/targets.h"
#include "kernels/cpu/x86/amx_tiles.h"
#include "kernels/cpu/x86/avx512_linear_int8.h"

namespace treeattn::kernels {
namespace {

using avx512::kGroup;
using avx512::kPanelRows;
using linear_loops::smaller;

constexpr int kTileRows = amx::kRows;  // of x
// A group of a tile of x: [4 columns][row][4] bytes, then the scales of its rows.
constexpr std::int64_t kGroupBytes = kGroup * kTileRows + 4 * kTileRows;

// Registers; there are four of sums, so that the next groups are on their way while one is scaled.
constexpr int kSums = 4, kWeights = 4, kX = 6;

std::size_t tile_bytes(std::int64_t cols) {
  const auto bytes = static_cast<std::size_t>(cols / kGroup * kGroupBytes);  // of one row: less, but for a few columns
  return bytes > avx512::int8_row_bytes(cols) ? bytes : avx512::int8_row_bytes(cols);
}

// One row is what VPDPBUSD wants. More become groups as above, zeros standing for missing rows.
void pack_tile(const float* x, int rows, std::int64_t cols, std::byte* packed) {
  if (rows == 1) return avx512::pack_int8_row(x, cols, packed);
  for (std::int64_t col = 0; col < cols; col += 2 * kGroup, packed += 2 * kGroupBytes) {
    const bool both = col + kGroup < cols;
    __m512i v[kTileRows];
    alignas(64) float scales[2][kTileRows] = {};
    for (int r = 0; r < kTileRows; ++r) {
      v[r] = _mm512_setzero_si512();
      if (r >= rows) continue;
      const avx512::QuantizedGroup first = avx512::quantize_group(x + r * cols + col);
      v[r] = _mm512_zextsi256_si512(first.values);
      scales[0][r] = first.scale;
      if (!both) continue;
      const avx512::QuantizedGroup second = avx512::quantize_group(x + r * cols + col + kGroup);
      v[r] = _mm512_inserti64x4(v[r], second.values, 1);
      scales[1][r] = second.scale;
    }
    avx512::transpose(v);
    for (int half = 0; half < (both ? 2 : 1); ++half) {
      std::byte* out = packed + half * kGroupBytes;
      for (int i = 0; i < 8; ++i) _mm512_store_si512(out + 64 * i, v[8 * half + i]);
      _mm512_store_ps(reinterpret_cast<float*>(out + kGroup * kTileRows), _mm512_load_ps(scales[half]));
    }
  }
}

// A tile of x, `rows` rows of y, by 16 rows of weights from `first` on, or fewer where the tiles have that shape.
void multiply_tile(amx::Tiles& tiles, const LinearArgs& args, const std::byte* x, std::int64_t row, std::int64_t rows,
                   std::int64_t first) {
  const avx512::Int8Panel panel(args, first);
  const std::int64_t groups = args.cols / kGroup;
  alignas(64) std::int32_t integers[kSums][kPanelRows][kTileRows] = {};
  const auto start_group = [&]<int I>(std::int64_t g) __attribute__((always_inline)) {
    tiles.zero<I>();
    tiles.load<kX + I % 2>(x + g * kGroupBytes, 64);
    tiles.load<kWeights + I % 2>(panel.row[0] + g * kGroup, args.cols);
    tiles.add_int8_products<I, kWeights + I % 2, kX + I % 2>();
    tiles.store<I>(integers[I], 64);
  };
  __m512 sums[kPanelRows];  // lanes are rows of x
  TREEATTN_UNROLL
  for (int n = 0; n < kPanelRows; ++n) sums[n] = _mm512_setzero_ps();
  alignas(64) float scales[16][kPanelRows];
  const auto finish_group = [&]<int I>(std::int64_t g) __attribute__((always_inline)) {
    const __m512 of_x = _mm512_load_ps(reinterpret_cast<const float*>(x + g * kGroupBytes + kGroup * kTileRows));
    TREEATTN_UNROLL
    for (int n = 0; n < kPanelRows; ++n) {
      sums[n] = avx512::add_group(sums[n], _mm512_load_si512(integers[I][n]),
                                  _mm512_mul_ps(of_x, _mm512_set1_ps(scales[g % 16][n])));
    }
  };
  const auto work_on_group = [&]<int I>(std::int64_t g) __attribute__((always_inline)) {
    if (g + 2 < groups) start_group.template operator()<(I + 2) % kSums>(g + 2);
    finish_group.template operator()<I>(g);
  };
  start_group.operator()<0>(0);
  if (groups > 1) start_group.operator()<1>(1);
  for (std::int64_t g = 0; g < groups; g += kSums) {
    if (g % 16 == 0) panel.load_scales(g, groups, scales);
    work_on_group.operator()<0>(g);
    if (g + 1 < groups) work_on_group.operator()<1>(g + 1);
    if (g + 2 < groups) work_on_group.operator()<2>(g + 2);
    if (g + 3 < groups) work_on_group.operator()<3>(g + 3);
  }
  __m512i turned[kPanelRows];
  TREEATTN_UNROLL
  for (int n = 0; n < kPanelRows; ++n) turned[n] = _mm512_castps_si512(sums[n]);
  avx512::transpose(turned);
  alignas(64) float of_row[kTileRows][kPanelRows];
  TREEATTN_UNROLL
  for (int r = 0; r < kTileRows; ++r) _mm512_store_si512(of_row[r], turned[r]);
  for (std::int64_t r = 0; r < rows; ++r) {
    avx512::put(args.y + (row + r) * args.y_stride + first, args.end - first, _mm512_load_ps(of_row[r]), args.add);
  }
}

// The first `rows` rows of x by weights [begin, end), `width` (at most 16) of them at a time. A tile of x stays in the
// second-level cache while those weights pass by.
void multiply_panels(const LinearArgs& args, std::int64_t rows, std::int64_t begin, std::int64_t end,
                     std::int64_t width) {
  amx::TileShapes shapes;
  for (int i = 0; i < kSums; ++i) shapes.set(i, width, 64);
  for (const int i : {0, 1}) shapes.set(kWeights + i, width, kGroup), shapes.set(kX + i, kGroup / 4, 64);
  amx::Tiles tiles(shapes);
  for (std::int64_t row = 0; row < rows; row += kTileRows) {
    const std::byte* x = args.x + row / kTileRows * static_cast<std::int64_t>(tile_bytes(args.cols));
    for (std::int64_t n = begin; n < end; n += width) {
      multiply_tile(tiles, args, x, row, smaller(kTileRows, rows - row), n);
    }
  }
}

void multiply(const LinearArgs& args) {
  if (args.rows == 1) return avx512::multiply_int8_row(args);
  const bool last_alone = args.rows % kTileRows == 1;
  const std::int64_t whole = args.begin + (args.end - args.begin) / kPanelRows * kPanelRows;
  const std::int64_t rows = args.rows - last_alone;
  if (args.begin < whole) multiply_panels(args, rows, args.begin, whole, kPanelRows);
  if (whole < args.end) multiply_panels(args, rows, whole, args.end, args.end - whole);
  if (last_alone) avx512::multiply_int8_row(linear_loops::last_row(args, kTileRows, tile_bytes(args.cols)));
}

}  // namespace

void use_amx_linear_int8(ModelKernels& kernels) {
  kernels.linear[static_cast<int>(DType::kInt8)] = {
      Activations::kInt8Groups, kTileRows, 1, tile_bytes, pack_tile, multiply, 0x1p-24, false};
}

}  // namespace treeattn::kernels
