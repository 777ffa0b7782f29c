// SPDX-License-Identifier: Apache-2.0
// Linear maps with int8 weights by SDOT. Panels have four neighbours in a register from four rows of weights: then a
// product takes four columns of x from a lane, and nothing has to be added up across lanes.
#include "kernels/cpu/arm/neon_dot_linear.h"
#include "kernels/cpu/arm/neon_linear_int8.h"
#include "kernels/cpu/targets.h"

namespace treeattn::kernels {
namespace {

using linear_loops::smaller;
using neon::bytes_at;
using neon::floats_at;
using neon::kGroup;

// A row of x. An odd number of lines, as rows a power of two apart share sets of the cache.
std::size_t tile_bytes(std::int64_t cols) {
  return (static_cast<std::size_t>(cols + cols / kGroup * 4) + 63) / 64 * 64 | 64;
}
std::int64_t row_bytes(std::int64_t cols) { return static_cast<std::int64_t>(tile_bytes(cols)); }

void pack_tile(const float* x, int, std::int64_t cols, std::byte* packed) { neon::pack_row(x, cols, packed); }

struct Kernel {
  static constexpr std::int64_t kPanelRows = 8;
  static constexpr std::int64_t kNearPanels = 4;
  static constexpr std::int64_t kDepth = 1024;
  // A group of a panel: [4 columns][row][column] bytes, then the scales of the rows.
  static constexpr std::int64_t kGroupBytes = kPanelRows * (kGroup + static_cast<std::int64_t>(sizeof(float)));
  static constexpr std::int64_t kPanelBytes = kDepth / kGroup * kGroupBytes;

  static std::int64_t whole(std::int64_t cols) { return cols; }

  template <int R, int N>
  static void multiply_few(const LinearArgs& args, std::int64_t row, std::int64_t first) {
    LinearArgs tile = args;
    tile.x += row * row_bytes(args.cols);
    tile.y += row * args.y_stride;
    const std::byte* next = args.w + (first + N) * args.cols;
    const float* next_scales = args.scales + (first + N) * (args.cols / kGroup);
    neon::multiply_rows<R, N>(tile, row_bytes(args.cols), first, 1, [&](std::int64_t group) {
      neon_dot::fetch<4 * N * kGroup>(next + N * group * kGroup);
      neon_dot::fetch<4 * N * sizeof(float)>(next_scales + N * group);
    });
  }

  // Missing rows are copies of the last.
  static void pack_panel(const LinearArgs& args, std::int64_t first, std::int64_t col, std::int64_t count,
                         std::byte* out) {
    const std::int64_t groups = args.cols / kGroup;
    for (int n = 0; n < kPanelRows; ++n) {
      const float* scales = args.scales + smaller(first + n, args.end - 1) * groups + col / kGroup;
      std::byte* to = out + kPanelRows * kGroup + n * static_cast<std::int64_t>(sizeof(float));
      for (std::int64_t g = 0; g < count / kGroup; ++g) {
        *reinterpret_cast<float*>(to + g * kGroupBytes) = scales[g];
      }
    }
    for (int four = 0; four < kPanelRows; four += 4) {
      const float* row[4];  // four columns make a float
      TREEATTN_UNROLL
      for (int n = 0; n < 4; ++n)
        row[n] = floats_at(args.w + smaller(first + four + n, args.end - 1) * args.cols + col);
      for (std::int64_t i = 0; i < count / 16; ++i) {
        const neon::Turned4 turned(vld1q_f32(row[0] + 4 * i), vld1q_f32(row[1] + 4 * i), vld1q_f32(row[2] + 4 * i),
                                   vld1q_f32(row[3] + 4 * i));
        float* to = reinterpret_cast<float*>(out + i / 2 * kGroupBytes + i % 2 * 16 * kPanelRows) + four;
        vst1q_f32(to, turned.first);
        vst1q_f32(to + kPanelRows, turned.second);
        vst1q_f32(to + 2 * kPanelRows, turned.third);
        vst1q_f32(to + 3 * kPanelRows, turned.fourth);
      }
    }
  }

  // Not inlined, as GCC 12 would run out of registers for addresses.
  template <int R>
  __attribute__((noinline)) static void multiply_panel(const LinearArgs& args, std::int64_t row, std::int64_t col,
                                                       std::int64_t count, const std::byte* w, float* sums) {
    const std::int8_t* x[R];
    const float* x_scales[R];
    float32x4_t acc[R][2];
    TREEATTN_UNROLL
    for (int r = 0; r < R; ++r) {
      const std::byte* packed = args.x + (row + r) * row_bytes(args.cols);
      x[r] = bytes_at(packed) + col;
      x_scales[r] = floats_at(packed + args.cols) + col / kGroup;
      TREEATTN_UNROLL
      for (int j = 0; j < 2; ++j) acc[r][j] = vld1q_f32(sums + r * kPanelRows + 4 * j);
    }
    for (std::int64_t g = 0; g < count / kGroup; ++g, w += kGroupBytes) {
      int32x4_t integers[R][2];
      TREEATTN_UNROLL
      for (int r = 0; r < R; ++r) integers[r][0] = neon::fresh_zero(), integers[r][1] = neon::fresh_zero();
      TREEATTN_UNROLL
      for (int half = 0; half < 2; ++half) {
        int8x16_t of_x[R];
        TREEATTN_UNROLL
        for (int r = 0; r < R; ++r) of_x[r] = vld1q_s8(x[r] + g * kGroup + 16 * half);
        const std::int8_t* of_w = bytes_at(w) + half * 16 * kPanelRows;
        add_lane<0>(integers, of_x, of_w);
        add_lane<1>(integers, of_x, of_w);
        add_lane<2>(integers, of_x, of_w);
        add_lane<3>(integers, of_x, of_w);
      }
      const float* scales = floats_at(w + kPanelRows * kGroup);
      TREEATTN_UNROLL
      for (int j = 0; j < 2; ++j) {
        const float32x4_t scale = vld1q_f32(scales + 4 * j);
        TREEATTN_UNROLL
        for (int r = 0; r < R; ++r) {
          acc[r][j] = vfmaq_f32(acc[r][j], vcvtq_f32_s32(integers[r][j]), vmulq_n_f32(scale, x_scales[r][g]));
        }
      }
    }
    TREEATTN_UNROLL
    for (int r = 0; r < R; ++r) {
      TREEATTN_UNROLL
      for (int j = 0; j < 2; ++j) vst1q_f32(sums + r * kPanelRows + 4 * j, acc[r][j]);
    }
  }

  // sums += four columns of R rows of x, from a lane of each, times those of eight rows of weights.
  template <int kLane, int R>
  __attribute__((always_inline)) static void add_lane(int32x4_t (&sums)[R][2], const int8x16_t (&x)[R],
                                                      const std::int8_t* w) {
    const int8x16_t low = vld1q_s8(w + kLane * 4 * kPanelRows), high = vld1q_s8(w + kLane * 4 * kPanelRows + 16);
    TREEATTN_UNROLL
    for (int r = 0; r < R; ++r) {
      sums[r][0] = vdotq_laneq_s32(sums[r][0], low, x[r], kLane);
      sums[r][1] = vdotq_laneq_s32(sums[r][1], high, x[r], kLane);
    }
  }
};

}  // namespace

void use_neon_dot_linear_int8(ModelKernels& kernels) {
  kernels.linear[static_cast<int>(DType::kInt8)] = {Activations::kInt8Groups,
                                                    1,
                                                    1,
                                                    tile_bytes,
                                                    pack_tile,
                                                    neon_dot::Multiplication<Kernel>::multiply,
                                                    0x1p-24,
                                                    false};
}

}  // namespace treeattn::kernels
