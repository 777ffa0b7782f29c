// SPDX-License-Identifier: Apache-2.0
// Linear maps with weights of float32, float16 and bfloat16 by float32 multiply-adds. x stays float32, and weights
// become float32, which is exact.
//
// The order of a sum: columns come in runs of kDepth. In a run column after column is added to lane c % 4 of a vector,
// and the lanes are added at the end. The runs are added one after the other. Four runs share kBlock columns, eight
// columns by turns: so one row of x meets a row of weights as it lies in memory with four sums at work, as a sum alone
// would wait for itself. Columns that do not fill a block make runs as they lie. With many rows of x what has to wait
// for the next run is a float and not a vector; x and weights are packed run by run.
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
constexpr std::int64_t kDepth = 256;
constexpr std::int64_t kBlock = 4 * kDepth;

// Where columns are that follow each other in a run: the first eight, and how far from eight to eight.
struct Run {
  std::int64_t col, distance;

  // The run that place `at` in the order of the sum belongs to, from there on.
  Run(std::int64_t at, std::int64_t cols) : col(at), distance(kStep) {
    const std::int64_t block = at / kBlock * kBlock, in_block = at - block;
    if (block + kBlock > cols) return;
    distance = kBlock / kDepth * kStep;
    col = block + in_block % kDepth / kStep * distance + in_block / kDepth * kStep;
  }
};

std::int64_t whole_steps(std::int64_t cols) { return (cols + kStep - 1) / kStep * kStep; }

// An odd number of lines, as rows a power of two apart share sets of the cache.
std::size_t tile_bytes(std::int64_t cols) {
  return (static_cast<std::size_t>(kTileRows * whole_steps(cols)) * sizeof(float) + 63) / 64 * 64 | 64;
}
const float* tile_at(const LinearArgs& args, std::int64_t row) {
  return reinterpret_cast<const float*>(args.x + row / kTileRows * static_cast<std::int64_t>(tile_bytes(args.cols)));
}

// In the order of the sum: [column / 4][row][4], zeros up to whole steps. A single row stays as it is.
void pack_tile(const float* x, int rows, std::int64_t cols, std::byte* packed) {
  float* out = reinterpret_cast<float*>(packed);
  for (std::int64_t at = 0; at < whole_steps(cols); at += 4) {
    const std::int64_t col = rows == 1 ? at : Run(at / kStep * kStep, cols).col + at % kStep;
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

// FMLA, where it is written: compilers do not move what is volatile past its like.
float32x4_t multiply_add_in_order(float32x4_t sum, float32x4_t a, float32x4_t b) {
  asm volatile("fmla %0.4s, %1.4s, %2.4s" : "+w"(sum) : "w"(a), "w"(b));
  return sum;
}

// Types of weights: how eight of them become float32, and the same with ZIP where it is written.
struct Float32 {
  using Element = float;
  static Floats8 load(const Element* p) { return neon::load_floats8(p); }
  static Floats8 load_in_order(const Element* p) { return load(p); }
};
struct Float16 {
  using Element = std::uint16_t;
  static Floats8 load(const Element* p) { return neon::widened(vreinterpretq_f16_u16(vld1q_u16(p))); }
  static Floats8 load_in_order(const Element* p) { return load(p); }
};
struct BFloat16 {
  using Element = std::uint16_t;
  static Floats8 load(const Element* p) { return neon::widened_bf16(vld1q_u16(p)); }
  static Floats8 load_in_order(const Element* p) {
    const uint16x8_t x = vld1q_u16(p), zeros = vdupq_n_u16(0);
    Floats8 out;
    asm volatile("zip1 %0.8h, %1.8h, %2.8h" : "=w"(out.low) : "w"(zeros), "w"(x));
    asm volatile("zip2 %0.8h, %1.8h, %2.8h" : "=w"(out.high) : "w"(zeros), "w"(x));
    return out;
  }
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
  static constexpr std::int64_t kDepth = treeattn::kernels::kDepth;
  static constexpr std::int64_t kPanelBytes = kDepth * kPanelRows * static_cast<std::int64_t>(sizeof(float));

  static std::int64_t whole(std::int64_t cols) { return whole_steps(cols); }

  // The lanes of each of four vectors, added.
  static float32x4_t add_lanes(const float32x4_t (&sums)[kPanelRows]) {
    return vpaddq_f32(vpaddq_f32(sums[0], sums[1]), vpaddq_f32(sums[2], sums[3]));
  }

  // A block of one row of x and one of weights; the total is in all lanes.
  //
  // The next weights become float32 while the last are multiplied: pairs of ZIP and pairs of FMLA by turns, and a sum
  // always in the same half of a pair. In this order no pipe of a Neoverse N1 has a ZIP and an FMLA that end at once,
  // and no sum waits for the other pipe.
  static void add_block(const float* x, const Element* w, float32x4_t& total) {
    constexpr std::int64_t kAhead = 768 / sizeof(Element);
    float32x4_t sums[4] = {};
    Floats8 even[4], odd[4];
    TREEATTN_UNROLL
    for (int run = 0; run < 4; ++run) even[run] = Weight::load_in_order(w + run * kStep);
    const auto step = [&](std::int64_t at, const Floats8(&now)[4], std::int64_t next_at, Floats8(&next)[4])
        __attribute__((always_inline)) {
      neon_dot::fetch<4 * kStep * sizeof(Element), neon_dot::Level::kFirst>(w + 4 * at + kAhead);
      TREEATTN_UNROLL
      for (int i = 0; i < 4; ++i) {
        next[i] = Weight::load_in_order(w + 4 * next_at + i * kStep);
        TREEATTN_UNROLL
        for (int half = 0; half < 2; ++half) {
          const int run = i % 2 * 2 + half;
          const float32x4_t of_x = vld1q_f32(x + 4 * at + run * kStep + i / 2 * 4);
          sums[run] = multiply_add_in_order(sums[run], of_x, i < 2 ? now[run].low : now[run].high);
        }
      }
    };
    for (std::int64_t at = 0; at < kDepth; at += 4 * kStep) {
      step(at + 0 * kStep, even, at + 1 * kStep, odd);
      step(at + 1 * kStep, odd, at + 2 * kStep, even);
      step(at + 2 * kStep, even, at + 3 * kStep, odd);
      step(at + 3 * kStep, odd, (at + 4 * kStep) % kDepth, even);
    }
    const float32x4_t runs = add_lanes(sums);
    total = vaddq_f32(total, vdupq_laneq_f32(runs, 0));
    total = vaddq_f32(total, vdupq_laneq_f32(runs, 1));
    total = vaddq_f32(total, vdupq_laneq_f32(runs, 2));
    total = vaddq_f32(total, vdupq_laneq_f32(runs, 3));
  }

  // One row of weights is taken four times. Not inlined, as GCC 12 would run out of registers, also below.
  template <int R, int N>
  __attribute__((noinline)) static void multiply_few(const LinearArgs& args, std::int64_t row, std::int64_t first) {
    if constexpr (R == 1 && N > 1) {
      for (int n = 0; n < N; ++n) multiply_few<1, 1>(args, row, first + n);
      return;
    }
    const float* x = tile_at(args, row);
    const Element* w[N];
    TREEATTN_UNROLL
    for (int n = 0; n < N; ++n) w[n] = reinterpret_cast<const Element*>(args.w) + (first + n) * args.cols;
    float32x4_t totals[R], sums[R][kPanelRows];
    TREEATTN_UNROLL
    for (int r = 0; r < R; ++r) totals[r] = vdupq_n_f32(0.0f);
    const auto add_step = [&](std::int64_t place, auto load) __attribute__((always_inline)) {
      float32x4_t low[R], high[R];
      TREEATTN_UNROLL
      for (int r = 0; r < R; ++r)
        low[r] = vld1q_f32(x + R * place + 4 * r), high[r] = vld1q_f32(x + R * (place + 4) + 4 * r);
      TREEATTN_UNROLL
      for (int n = 0; n < kPanelRows; ++n) {
        const Floats8 weights = load(w[n % N]);
        TREEATTN_UNROLL
        for (int r = 0; r < R; ++r) sums[r][n] = vfmaq_f32(sums[r][n], low[r], weights.low);
        TREEATTN_UNROLL
        for (int r = 0; r < R; ++r) sums[r][n] = vfmaq_f32(sums[r][n], high[r], weights.high);
      }
    };
    std::int64_t at = 0;
    if constexpr (R == 1) {
      for (; at + kBlock <= args.cols; at += kBlock) add_block(x + at, w[0] + at, totals[0]);
    }
    while (at < args.cols) {
      TREEATTN_UNROLL
      for (int i = 0; i < R * kPanelRows; ++i) sums[i / kPanelRows][i % kPanelRows] = vdupq_n_f32(0.0f);
      Run run(at, args.cols);
      const std::int64_t end = smaller(at + kDepth, args.cols);
      // The four runs of a block go through the same lines: each brings a row of the next block into the first level.
      const std::int64_t next = at / kBlock * kBlock + kBlock;
      const Element* near = w[at / kDepth % 4 % N] + (next + kBlock <= args.cols ? next : N * args.cols);
      for (; at + kStep <= end; at += kStep, run.col += run.distance, near += 4 * kStep) {
        if constexpr (N == 4) {
          neon_dot::fetch<4 * kStep * sizeof(Element), neon_dot::Level::kFirst>(near);
          neon_dot::fetch<4 * kStep * sizeof(Element)>(w[0] + N * (args.cols + at));  // the next four rows
        }
        add_step(at, [&](const Element* p) { return Weight::load(p + run.col); });
      }
      if (at < end) {
        add_step(at, [&](const Element* p) { return load_last<Weight>(p, at, args.cols); });
        at = end;
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
      for (int n = 0; n < N; ++n) put(y + n, out[n], args.add);
    }
  }

  // In the order of the sum: [column / 4][row][4]. Missing rows are copies of the last.
  static void pack_panel(const LinearArgs& args, std::int64_t first, std::int64_t col, std::int64_t count,
                         std::byte* panel) {
    for (int n = 0; n < kPanelRows; ++n) {
      const auto* row = reinterpret_cast<const Element*>(args.w) + smaller(first + n, args.end - 1) * args.cols;
      float* out = reinterpret_cast<float*>(panel) + 4 * n;
      Run run(col, args.cols);
      for (std::int64_t i = 0; i < count; i += kStep, run.col += run.distance) {
        const bool whole = run.col + kStep <= args.cols;
        const Floats8 weights = whole ? Weight::load(row + run.col) : load_last<Weight>(row, run.col, args.cols);
        vst1q_f32(out + i * kPanelRows, weights.low);
        vst1q_f32(out + (i + 4) * kPanelRows, weights.high);
      }
    }
  }

  template <int R>
  __attribute__((noinline)) static void multiply_panel(const LinearArgs& args, std::int64_t row, std::int64_t col,
                                                       std::int64_t count, const std::byte* panel, float* sums) {
    const float* x = tile_at(args, row) + R * col;
    const Run run(col, args.cols);
    const float* w = reinterpret_cast<const float*>(panel);
    // The next tile, or the first again. Only whole ones: an address that was never written to would take far longer.
    const float* next = tile_at(args, row + 2 * kTileRows <= args.rows ? row + kTileRows : 0) + kTileRows * col;
    float32x4_t acc[R][kPanelRows];
    TREEATTN_UNROLL
    for (int i = 0; i < R * kPanelRows; ++i) acc[i / kPanelRows][i % kPanelRows] = vdupq_n_f32(0.0f);
    for (std::int64_t i = 0; i < count; i += 4, x += 4 * R, next += 4 * kTileRows, w += 4 * kPanelRows) {
      __builtin_prefetch(next);
      if constexpr (R == 1) x = tile_at(args, row) + run.col + i / kStep * run.distance + i % kStep;
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
                                             1,
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
