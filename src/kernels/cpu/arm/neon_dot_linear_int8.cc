// SPDX-License-Identifier: Apache-2.0
// Linear maps with int8 weights by SDOT.
//
// The order of a sum: columns come in blocks of kDepth. In a block group g is added to lane g % 4 of a vector, lane =
// fma(integer, scale of x * scale of the weights, lane), so one row of weights, which is one stream, fills the vectors.
// At the end of a block its lanes are added to the total, one after the other.
//
// With many rows of x panels have four neighbours in a register from four rows of weights: a product takes four columns
// of x from a lane, and nothing has to be added up across lanes. The groups of a lane of the sum lie side by side.
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

// A row of x or of weights.
struct Row {
  const std::int8_t* bytes;
  const float* scales;

  Row from(std::int64_t col) const { return {bytes + col, scales + col / kGroup}; }
};
Row row_of_x(const LinearArgs& args, std::int64_t row) {
  const std::byte* packed = args.x + row * row_bytes(args.cols);
  return {bytes_at(packed), floats_at(packed + args.cols)};
}
Row row_of_w(const LinearArgs& args, std::int64_t row) {
  return {bytes_at(args.w) + row * args.cols, args.scales + row * (args.cols / kGroup)};
}

void pack_tile(const float* x, int, std::int64_t cols, std::byte* packed) { neon::pack_row(x, cols, packed); }

struct Kernel {
  static constexpr std::int64_t kPanelRows = 8;
  static constexpr std::int64_t kNearPanels = 2;
  static constexpr std::int64_t kDepth = 2048;
  static constexpr int kLanes = 4;              // of a sum
  static constexpr std::int64_t kAhead = 1024;  // bytes: how far ahead weights are fetched
  // A group of a panel: [4 columns][row][column] bytes, then the scales of the rows.
  static constexpr std::int64_t kGroupBytes = kPanelRows * (kGroup + static_cast<std::int64_t>(sizeof(float)));
  static constexpr std::int64_t kPanelBytes = kDepth / kGroup * kGroupBytes;

  static std::int64_t whole(std::int64_t cols) { return cols; }

  // One row of x meets one row of weights after the other, which is one stream. More are bound by loads: with two rows
  // of weights at a time those of x are shared.
  template <int R, int N>
  static void multiply_few(const LinearArgs& args, std::int64_t row, std::int64_t first) {
    constexpr int kAtOnce = R == 1 || N == 1 ? 1 : 2;
    for (int n = 0; n < N; n += kAtOnce) multiply_rows<R, kAtOnce>(args, row, first + n);
  }

  template <int R, int N>
  __attribute__((noinline)) static void multiply_rows(const LinearArgs& args, std::int64_t row, std::int64_t first) {
    const std::int64_t groups = args.cols / kGroup;
    Row x[R], w[N];
    float32x4_t totals[N];  // element r for row r of x
    TREEATTN_UNROLL
    for (int r = 0; r < R; ++r) x[r] = row_of_x(args, row + r);
    TREEATTN_UNROLL
    for (int n = 0; n < N; ++n) w[n] = row_of_w(args, first + n), totals[n] = vdupq_n_f32(0.0f);
    for (std::int64_t g = 0; g < groups;) {
      const std::int64_t end = smaller(g + kDepth / kGroup, groups);
      float32x4_t sums[N][R];
      TREEATTN_UNROLL
      for (int i = 0; i < N * R; ++i) sums[i / R][i % R] = vdupq_n_f32(0.0f);
      for (; g + kLanes <= end; g += kLanes) {
        TREEATTN_UNROLL
        for (int n = 0; n < N; ++n) {
          neon_dot::fetch<kLanes * kGroup, neon_dot::Level::kFirst>(w[n].bytes + g * kGroup + kAhead);
        }
        add_groups(x, w, g, sums);
      }
      for (; g < end; ++g) {
        TREEATTN_UNROLL
        for (int i = 0; i < N * R; ++i) {
          sums[i / R][i % R] = with_last_group(sums[i / R][i % R], x[i % R], w[i / R], g);
        }
      }
      TREEATTN_UNROLL
      for (int n = 0; n < N; ++n) {
        const neon::Turned4 lanes(sums[n][0], sums[n][1 % R], sums[n][2 % R], sums[n][3 % R]);
        totals[n] = vaddq_f32(totals[n], lanes.first);
        totals[n] = vaddq_f32(totals[n], lanes.second);
        totals[n] = vaddq_f32(totals[n], lanes.third);
        totals[n] = vaddq_f32(totals[n], lanes.fourth);
      }
    }
    TREEATTN_UNROLL
    for (int n = 0; n < N; ++n) {
      float out[neon_dot::kTileRows];
      vst1q_f32(out, totals[n]);
      float* y = args.y + row * args.y_stride + first + n;
      TREEATTN_UNROLL
      for (int r = 0; r < R; ++r) linear_loops::put(y + r * args.y_stride, out[r], args.add);
    }
  }

  // Adds kLanes groups, from g on, of R rows of x times those of N rows of weights, each to its lane.
  template <int R, int N>
  __attribute__((always_inline)) static void add_groups(const Row (&x)[R], const Row (&w)[N], std::int64_t g,
                                                        float32x4_t (&sums)[N][R]) {
    int8x16_t weights[N][2 * kLanes];
    TREEATTN_UNROLL
    for (int n = 0; n < N; ++n) {
      TREEATTN_UNROLL
      for (int i = 0; i < 2 * kLanes; ++i) weights[n][i] = vld1q_s8(w[n].bytes + g * kGroup + 16 * i);
    }
    TREEATTN_UNROLL
    for (int r = 0; r < R; ++r) {
      const std::int8_t* of_x = x[r].bytes + g * kGroup;
      int32x4_t pairs[N][2];  // of groups
      TREEATTN_UNROLL
      for (int pair = 0; pair < 2; ++pair) {
        int32x4_t products[N][2];
        TREEATTN_UNROLL
        for (int i = 0; i < 2; ++i) {
          const int at = 4 * pair + 2 * i;
          const int8x16_t low = vld1q_s8(of_x + 16 * at), high = vld1q_s8(of_x + 16 * at + 16);
          TREEATTN_UNROLL
          for (int n = 0; n < N; ++n) {
            products[n][i] = vdotq_s32(vdotq_s32(neon::fresh_zero(), low, weights[n][at]), high, weights[n][at + 1]);
          }
        }
        TREEATTN_UNROLL
        for (int n = 0; n < N; ++n) pairs[n][pair] = vpaddq_s32(products[n][0], products[n][1]);
      }
      const float32x4_t x_scales = vld1q_f32(x[r].scales + g);
      TREEATTN_UNROLL
      for (int n = 0; n < N; ++n) {
        const float32x4_t scales = vmulq_f32(x_scales, vld1q_f32(w[n].scales + g));
        sums[n][r] = vfmaq_f32(sums[n][r], vcvtq_f32_s32(vpaddq_s32(pairs[n][0], pairs[n][1])), scales);
      }
    }
  }

  // The same with a group that does not fill the lanes, and one row each.
  static float32x4_t with_last_group(float32x4_t sum, const Row& x, const Row& w, std::int64_t g) {
    int32x4_t products = vdupq_n_s32(0);
    for (std::int64_t col = g * kGroup; col < (g + 1) * kGroup; col += 16) {
      products = vdotq_s32(products, vld1q_s8(x.bytes + col), vld1q_s8(w.bytes + col));
    }
    const auto integer = static_cast<float>(vaddvq_s32(products));
    float lanes[kLanes];
    vst1q_f32(lanes, sum);
    lanes[g % kLanes] = __builtin_fmaf(integer, x.scales[g] * w.scales[g], lanes[g % kLanes]);
    return vld1q_f32(lanes);
  }

  // Of group g in a panel of `count` columns: lane by lane, as they are added up.
  static std::int64_t place_of(std::int64_t g, std::int64_t count) {
    return g % kLanes * ((count / kGroup + kLanes - 1) / kLanes) + g / kLanes;
  }

  // Missing rows are copies of the last.
  static void pack_panel(const LinearArgs& args, std::int64_t first, std::int64_t col, std::int64_t count,
                         std::byte* out) {
    const std::int64_t groups = args.cols / kGroup;
    for (int n = 0; n < kPanelRows; ++n) {
      const float* scales = args.scales + smaller(first + n, args.end - 1) * groups + col / kGroup;
      std::byte* to = out + kPanelRows * kGroup + n * static_cast<std::int64_t>(sizeof(float));
      for (std::int64_t g = 0; g < count / kGroup; ++g) {
        *reinterpret_cast<float*>(to + place_of(g, count) * kGroupBytes) = scales[g];
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
        float* to =
            reinterpret_cast<float*>(out + place_of(i / 2, count) * kGroupBytes + i % 2 * 16 * kPanelRows) + four;
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
    Row x[R];
    TREEATTN_UNROLL
    for (int r = 0; r < R; ++r) x[r] = row_of_x(args, row + r).from(col);
    // Meanwhile a row of the next tile comes with each lane, or of the first again. Only whole ones, as in floats.
    const std::int64_t next_row = row + 2 * neon_dot::kTileRows <= args.rows ? row + neon_dot::kTileRows : 0;
    for (int lane = 0; lane < kLanes; ++lane) {
      float32x4_t acc[R][2];
      TREEATTN_UNROLL
      for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = vdupq_n_f32(0.0f);
      const std::byte* group = w + place_of(lane, count) * kGroupBytes;
      const std::int8_t* next = row_of_x(args, next_row + lane).from(col).bytes;
      for (std::int64_t g = lane; g < count / kGroup; g += kLanes, group += kGroupBytes, next += kLanes * kGroup) {
        neon_dot::fetch<kLanes * kGroup, neon_dot::Level::kFirst>(next);
        add_group(x, g, group, acc);
      }
      TREEATTN_UNROLL
      for (int r = 0; r < R; ++r) {
        TREEATTN_UNROLL
        for (int j = 0; j < 2; ++j) {
          float* sum = sums + r * kPanelRows + 4 * j;
          vst1q_f32(sum, vaddq_f32(vld1q_f32(sum), acc[r][j]));
        }
      }
    }
  }

  // sums += group g of R rows of x times that of a panel.
  template <int R>
  __attribute__((always_inline)) static void add_group(const Row (&x)[R], std::int64_t g, const std::byte* w,
                                                       float32x4_t (&sums)[R][2]) {
    int32x4_t integers[R][2];
    TREEATTN_UNROLL
    for (int r = 0; r < R; ++r) integers[r][0] = neon::fresh_zero(), integers[r][1] = neon::fresh_zero();
    TREEATTN_UNROLL
    for (int half = 0; half < 2; ++half) {
      int8x16_t of_x[R];
      TREEATTN_UNROLL
      for (int r = 0; r < R; ++r) of_x[r] = vld1q_s8(x[r].bytes + g * kGroup + 16 * half);
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
        sums[r][j] = vfmaq_f32(sums[r][j], vcvtq_f32_s32(integers[r][j]), vmulq_n_f32(scale, x[r].scales[g]));
      }
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
