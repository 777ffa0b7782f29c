// SPDX-License-Identifier: Apache-2.0
// Linear maps with weights of float32, float16 and bfloat16 by float32 multiply-adds. x stays float32, and weights
// become float32, which is exact.
//
// The order of a sum: columns come in runs of kDepth. In a run column c is added to lane c % 4 of a vector, one column
// after the other, and the lanes are added at the end. The runs are added one after the other. In that order rows of x
// and of weights meet as they lie in memory, whether there is one row of x or many; and with many, what has to wait
// for the next run is a float and not a vector.
#include "kernels/cpu/arm/neon_dot_linear.h"
#include "kernels/cpu/arm/neon_vectors.h"
#include "kernels/cpu/targets.h"

namespace treeattn::kernels {
namespace {

using linear_loops::put;
using linear_loops::smaller;
using neon::Floats8;
using neon_dot::kTileRows;

constexpr std::int64_t kStep = 8;  // columns, loaded together

std::int64_t whole_steps(std::int64_t cols) { return (cols + kStep - 1) / kStep * kStep; }

// An odd number of lines, as rows a power of two apart share sets of the cache.
std::size_t tile_bytes(std::int64_t cols) {
  return (static_cast<std::size_t>(kTileRows * whole_steps(cols)) * sizeof(float) + 63) / 64 * 64 | 64;
}
const float* tile_at(const LinearArgs& args, std::int64_t row) {
  return reinterpret_cast<const float*>(args.x + row / kTileRows * static_cast<std::int64_t>(tile_bytes(args.cols)));
}

// [column / 4][row][4], zeros up to whole steps.
void pack_tile(const float* x, int rows, std::int64_t cols, std::byte* packed) {
  float* out = reinterpret_cast<float*>(packed);
  for (std::int64_t col = 0; col < whole_steps(cols); col += 4) {
    for (int r = 0; r < rows; ++r, out += 4) {
      const float* from = x + r * cols + col;
      if (col + 4 <= cols) {
        vst1q_f32(out, vld1q_f32(from));
      } else {
        for (int i = 0; i < 4; ++i) out[i] = col + i < cols ? from[i] : 0.0f;
      }
    }
  }
}

// Types of weights: how eight of them become float32.
struct Float32 {
  using Element = float;
  static Floats8 load(const Element* p) { return neon::load_floats8(p); }
};
struct Float16 {
  using Element = std::uint16_t;
  static Floats8 load(const Element* p) { return neon::widened(vreinterpretq_f16_u16(vld1q_u16(p))); }
};
struct BFloat16 {
  using Element = std::uint16_t;
  static Floats8 load(const Element* p) { return neon::widened_bf16(vld1q_u16(p)); }
};

// The last columns of a row, with zeros up to a whole step.
template <class Weight>
Floats8 load_last(const typename Weight::Element* row, std::int64_t col, std::int64_t cols) {
  typename Weight::Element filled[kStep] = {};
  for (std::int64_t i = col; i < cols; ++i) filled[i - col] = row[i];
  return Weight::load(filled);
}

template <class Weight>
struct Kernel {
  using Element = typename Weight::Element;
  static constexpr std::int64_t kPanelRows = 4;
  static constexpr std::int64_t kNearPanels = 8;
  static constexpr std::int64_t kDepth = 256;
  static constexpr std::int64_t kPanelBytes = kDepth * kPanelRows * static_cast<std::int64_t>(sizeof(float));

  static std::int64_t whole(std::int64_t cols) { return whole_steps(cols); }

  // The lanes of each of four vectors, added.
  static float32x4_t add_lanes(const float32x4_t (&sums)[kPanelRows]) {
    return vpaddq_f32(vpaddq_f32(sums[0], sums[1]), vpaddq_f32(sums[2], sums[3]));
  }

  // One row of weights is taken four times.
  template <int R, int N>
  static void multiply_few(const LinearArgs& args, std::int64_t row, std::int64_t first, std::int64_t distance) {
    const float* x = tile_at(args, row);
    const Element* w[N];
    TREEATTN_UNROLL
    for (int n = 0; n < N; ++n) w[n] = reinterpret_cast<const Element*>(args.w) + (first + n * distance) * args.cols;
    float32x4_t totals[R], sums[R][kPanelRows];
    TREEATTN_UNROLL
    for (int r = 0; r < R; ++r) totals[r] = vdupq_n_f32(0.0f);
    const auto add_step = [&](std::int64_t col, auto load) __attribute__((always_inline)) {
      float32x4_t low[R], high[R];
      TREEATTN_UNROLL
      for (int r = 0; r < R; ++r)
        low[r] = vld1q_f32(x + R * col + 4 * r), high[r] = vld1q_f32(x + R * (col + 4) + 4 * r);
      TREEATTN_UNROLL
      for (int n = 0; n < kPanelRows; ++n) {
        const Floats8 weights = load(w[n % N], col);
        TREEATTN_UNROLL
        for (int r = 0; r < R; ++r) sums[r][n] = vfmaq_f32(sums[r][n], low[r], weights.low);
        TREEATTN_UNROLL
        for (int r = 0; r < R; ++r) sums[r][n] = vfmaq_f32(sums[r][n], high[r], weights.high);
      }
    };
    for (std::int64_t col = 0; col < args.cols;) {
      TREEATTN_UNROLL
      for (int i = 0; i < R * kPanelRows; ++i) sums[i / kPanelRows][i % kPanelRows] = vdupq_n_f32(0.0f);
      const std::int64_t end = smaller(col + kDepth, args.cols);
      for (; col + kStep <= end; col += kStep) {
        add_step(col, [](const Element* p, std::int64_t at) { return Weight::load(p + at); });
      }
      if (col < end) {
        add_step(col, [&](const Element* p, std::int64_t at) { return load_last<Weight>(p, at, args.cols); });
        col = end;
      }
      TREEATTN_UNROLL
      for (int r = 0; r < R; ++r) totals[r] = vaddq_f32(totals[r], add_lanes(sums[r]));
    }
    TREEATTN_UNROLL
    for (int r = 0; r < R; ++r) {
      float out[kPanelRows];
      vst1q_f32(out, totals[r]);
      float* y = args.y + (row + r) * args.y_stride + first;
      TREEATTN_UNROLL
      for (int n = 0; n < N; ++n) put(y + n * distance, out[n], args.add);
    }
  }

  // [column / 4][row][4]. Missing rows are copies of the last.
  static void pack_panel(const LinearArgs& args, std::int64_t first, std::int64_t col, std::int64_t count,
                         std::byte* panel) {
    for (int n = 0; n < kPanelRows; ++n) {
      const auto* row = reinterpret_cast<const Element*>(args.w) + smaller(first + n, args.end - 1) * args.cols;
      float* out = reinterpret_cast<float*>(panel) + 4 * n;
      for (std::int64_t i = 0; i < count; i += kStep) {
        const bool whole = col + i + kStep <= args.cols;
        const Floats8 weights = whole ? Weight::load(row + col + i) : load_last<Weight>(row, col + i, args.cols);
        vst1q_f32(out + i * kPanelRows, weights.low);
        vst1q_f32(out + (i + 4) * kPanelRows, weights.high);
      }
    }
  }

  // Not inlined, as GCC 12 would run out of registers for addresses.
  template <int R>
  __attribute__((noinline)) static void multiply_panel(const LinearArgs& args, std::int64_t row, std::int64_t col,
                                                       std::int64_t count, const std::byte* panel, float* sums) {
    const float* x = tile_at(args, row) + R * col;
    const float* w = reinterpret_cast<const float*>(panel);
    // The next tile, or the first again. Only whole ones: an address that was never written to would take far longer.
    const float* next = tile_at(args, row + 2 * kTileRows <= args.rows ? row + kTileRows : 0) + kTileRows * col;
    float32x4_t acc[R][kPanelRows];
    TREEATTN_UNROLL
    for (int i = 0; i < R * kPanelRows; ++i) acc[i / kPanelRows][i % kPanelRows] = vdupq_n_f32(0.0f);
    for (std::int64_t i = 0; i < count; i += 4, x += 4 * R, next += 4 * kTileRows, w += 4 * kPanelRows) {
      __builtin_prefetch(next);
      float32x4_t weights[kPanelRows];
      TREEATTN_UNROLL
      for (int n = 0; n < kPanelRows; ++n) weights[n] = vld1q_f32(w + 4 * n);
      TREEATTN_UNROLL
      for (int r = 0; r < R; ++r) {
        const float32x4_t four = vld1q_f32(x + 4 * r);
        TREEATTN_UNROLL
        for (int n = 0; n < kPanelRows; ++n) acc[r][n] = vfmaq_f32(acc[r][n], four, weights[n]);
      }
    }
    TREEATTN_UNROLL
    for (int r = 0; r < R; ++r, sums += kPanelRows) vst1q_f32(sums, vaddq_f32(vld1q_f32(sums), add_lanes(acc[r])));
  }
};

template <class Weight>
void use(ModelKernels& kernels, DType dtype) {
  kernels.linear[static_cast<int>(dtype)] = {Activations::kFloat32,
                                             kTileRows,
                                             4,
                                             tile_bytes,
                                             pack_tile,
                                             neon_dot::Multiplication<Kernel<Weight>>::multiply,
                                             0x1p-24,
                                             false};
}

}  // namespace

void use_neon_dot_linear_floats(ModelKernels& kernels) {
  use<Float32>(kernels, DType::kFloat32);
  use<Float16>(kernels, DType::kFloat16);
  use<BFloat16>(kernels, DType::kBFloat16);
}

}  // namespace treeattn::kernels
