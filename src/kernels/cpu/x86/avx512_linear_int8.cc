// SPDX-License-Identifier: Apache-2.0
// Linear maps with int8 weights by VPDPBUSD. For more than one row of x the weights are turned round first, 16 rows of
// them to the 16 lanes: then the sum over a group needs no lanes to be added.
#include "kernels/cpu/x86/avx512_linear_int8.h"

#include "kernels/cpu/targets.h"

namespace treeattn::kernels {
namespace {

using avx512::kGroup;
using avx512::kPanelRows;
using linear_loops::smaller;

constexpr std::int64_t kDepth = 64;  // groups that are worked on before the next weights are turned round
// A group of a packed panel: [4 columns][row][4] bytes, then the scales of its rows.
constexpr std::int64_t kGroupBytes = kGroup * kPanelRows + 4 * kPanelRows;

void pack_row(const float* x, int, std::int64_t cols, std::byte* packed) { avx512::pack_int8_row(x, cols, packed); }

// Groups [group, group + count) of a panel; group is a multiple of 16.
void pack_panel(const avx512::Int8Panel& panel, std::int64_t cols, std::int64_t group, std::int64_t count,
                std::byte* out) {
  for (std::int64_t g = group; g < group + count; g += 2) {
    __m512i v[kPanelRows];
    TREEATTN_UNROLL
    for (int n = 0; n < kPanelRows; ++n) v[n] = avx512::load_bytes(panel.row[n] + g * kGroup, cols - g * kGroup);
    avx512::transpose(v);
    std::byte* at = out + (g - group) * kGroupBytes;
    TREEATTN_UNROLL
    for (int i = 0; i < 8; ++i) _mm512_store_si512(at + 64 * i, avx512::made_unsigned(v[i]));
    if (g + 1 == group + count) break;
    TREEATTN_UNROLL
    for (int i = 0; i < 8; ++i) _mm512_store_si512(at + kGroupBytes + 64 * i, avx512::made_unsigned(v[8 + i]));
  }
  for (std::int64_t g = group; g < group + count; g += 16) {
    alignas(64) float scales[16][kPanelRows];
    panel.load_scales(g, group + count, scales);
    for (std::int64_t i = g; i < smaller(g + 16, group + count); ++i) {
      std::byte* at = out + (i - group) * kGroupBytes + kGroup * kPanelRows;
      _mm512_store_ps(reinterpret_cast<float*>(at), _mm512_load_ps(scales[i - g]));
    }
  }
}

// R rows of x by a packed panel: sums [R][16].
template <int R>
void multiply_panel(const std::byte* packed_x, std::int64_t cols, std::int64_t group, std::int64_t count,
                    const std::byte* panel, float* sums) {
  avx512::Int8Row x[R];
  __m512 acc[R];
  TREEATTN_UNROLL
  for (int r = 0; r < R; ++r) {
    x[r] = avx512::int8_row(packed_x + r * static_cast<std::int64_t>(avx512::int8_row_bytes(cols)), cols);
    acc[r] = _mm512_load_ps(sums + r * kPanelRows);
  }
  for (std::int64_t g = group; g < group + count; ++g, panel += kGroupBytes) {
    __m512i integers[R];
    TREEATTN_UNROLL
    for (int r = 0; r < R; ++r) integers[r] = _mm512_set1_epi32(x[r].corrections[g]);
    TREEATTN_UNROLL
    for (int i = 0; i < 8; ++i) {
      const __m512i weights = _mm512_load_si512(panel + 64 * i);
      TREEATTN_UNROLL
      for (int r = 0; r < R; ++r) {
        std::int32_t four = 0;
        __builtin_memcpy(&four, x[r].values + g * kGroup + 4 * i, sizeof(four));
        integers[r] = _mm512_dpbusd_epi32(integers[r], weights, _mm512_set1_epi32(four));
      }
    }
    const __m512 scales = _mm512_load_ps(reinterpret_cast<const float*>(panel + kGroup * kPanelRows));
    TREEATTN_UNROLL
    for (int r = 0; r < R; ++r) {
      acc[r] = avx512::add_group(acc[r], integers[r], _mm512_mul_ps(_mm512_set1_ps(x[r].scales[g]), scales));
    }
  }
  TREEATTN_UNROLL
  for (int r = 0; r < R; ++r) _mm512_store_ps(sums + r * kPanelRows, acc[r]);
}

// All rows of x by 16 rows of weights.
void multiply_rows(const LinearArgs& args, std::int64_t first) {
  std::byte* packed = args.scratch;
  float* sums = reinterpret_cast<float*>(args.scratch + kDepth * kGroupBytes);  // [rows of x][16]
  const avx512::Int8Panel panel(args, first);
  const auto bytes = static_cast<std::int64_t>(avx512::int8_row_bytes(args.cols));
  const std::int64_t groups = args.cols / kGroup;
  __builtin_memset(sums, 0, sizeof(float) * static_cast<std::size_t>(args.rows * kPanelRows));
  for (std::int64_t group = 0; group < groups; group += kDepth) {
    const std::int64_t count = smaller(kDepth, groups - group);
    pack_panel(panel, args.cols, group, count, packed);
    const auto add = [&]<int R>(std::int64_t row) {
      multiply_panel<R>(args.x + row * bytes, args.cols, group, count, packed, sums + row * kPanelRows);
    };
    std::int64_t row = 0;
    for (; row + 8 <= args.rows; row += 8) add.operator()<8>(row);
    for (; row + 4 <= args.rows; row += 4) add.operator()<4>(row);
    for (; row + 2 <= args.rows; row += 2) add.operator()<2>(row);
    if (row < args.rows) add.operator()<1>(row);
  }
  for (std::int64_t row = 0; row < args.rows; ++row) {
    avx512::put(args.y + row * args.y_stride + first, args.end - first, _mm512_load_ps(sums + row * kPanelRows),
                args.add);
  }
}

void multiply(const LinearArgs& args) {
  if (args.rows == 1) return avx512::multiply_int8_row(args);
  for (std::int64_t n = args.begin; n < args.end; n += kPanelRows) multiply_rows(args, n);
}

static_assert(kDepth % 16 == 0 &&
              kDepth * kGroupBytes + kLinearRows * kPanelRows * sizeof(float) <= kLinearScratchBytes);

}  // namespace

void use_avx512_linear_int8(ModelKernels& kernels) {
  kernels.linear[static_cast<int>(DType::kInt8)] = {
      Activations::kInt8Groups, 1, 1, avx512::int8_row_bytes, pack_row, multiply, 0x1p-24, false};
}

}  // namespace treeattn::kernels
