// SPDX-License-Identifier: Apache-2.0
// Linear maps with bfloat16 weights by BFMMLA, which multiplies a 2x4 by a 4x2 block into 2x2 floats. x is rounded to
// bfloat16. The instruction rounds to odd (unit roundoff 2^-23) and takes subnormal numbers for zero.
//
// The order of the sum: a row of weights is cut into runs of four. The even runs are one chain of additions, the odd
// runs another, and the two are added at the end. That is the order in which
//   - one row of x meets a row of weights as both lie in memory: eight elements are a 2x4 block, and of the 2x2 result
//     the diagonal is wanted. No element has to be moved, and reading the weights is all that counts;
//   - pairs of rows of x meet pairs of rows of weights, run by run, once with the even and once with the odd runs.
#include <arm_neon.h>

#include "kernels/cpu/linear_loops.h"
#include "kernels/cpu/targets.h"

namespace treeattn::kernels {
namespace {

using linear_loops::put;
using linear_loops::smaller;

constexpr int kTileRows = 8;   // of x, in pairs
constexpr int kPanelRows = 8;  // of weights, in pairs
constexpr int kPanels = kLinearBlock / kPanelRows;
constexpr std::int64_t kDepth = 128;  // runs of each chain that are worked on before the next weights are packed
constexpr std::int64_t kPanelWords = kDepth * 4 * kPanelRows;  // one chain of a packed panel
constexpr int kSums = kTileRows * kPanelRows;                  // of one tile, panel and chain

using Words = std::uint16_t;

std::int64_t runs_of(std::int64_t cols) { return (cols + 7) / 8; }  // of each chain
std::size_t tile_bytes(std::int64_t cols) {
  return (static_cast<std::size_t>(runs_of(cols)) * 8 * kTileRows * sizeof(Words) + 63) / 64 * 64;
}

bfloat16x8_t load8(const Words* p) { return vreinterpretq_bf16_u16(vld1q_u16(p)); }

// Elements [col, col + 8) of a row, zeros beyond its end.
uint16x8_t load_weights(const Words* row, std::int64_t col, std::int64_t cols) {
  if (col + 8 <= cols) return vld1q_u16(row + col);
  Words filled[8] = {};
  for (std::int64_t i = col; i < cols; ++i) filled[i - col] = row[i];
  return vld1q_u16(filled);
}
uint16x8_t load_activations(const float* row, std::int64_t col, std::int64_t cols) {
  float filled[8] = {};
  const float* from = row + col;
  if (col + 8 > cols) {
    for (std::int64_t i = col; i < cols; ++i) filled[i - col] = row[i];
    from = filled;
  }
  const bfloat16x8_t low = vcvtq_low_bf16_f32(vld1q_f32(from));
  return vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(low, vld1q_f32(from + 4)));
}

// Two rows side by side: eight elements of each become a block of the even chain and one of the odd chain.
struct Pair {
  uint16x8_t even, odd;
};
Pair pair_of(uint16x8_t a, uint16x8_t b) {
  const uint64x2_t x = vreinterpretq_u64_u16(a), y = vreinterpretq_u64_u16(b);
  return {vreinterpretq_u16_u64(vzip1q_u64(x, y)), vreinterpretq_u16_u64(vzip2q_u64(x, y))};
}
void store_pair(Pair pair, Words* even, Words* odd) {
  vst1q_u16(even, pair.even);
  vst1q_u16(odd, pair.odd);
}

// One row stays as it is. More become [chain][run][pair][row of the pair][4].
void pack_tile(const float* x, int rows, std::int64_t cols, std::byte* packed) {
  Words* out = reinterpret_cast<Words*>(packed);
  const std::int64_t runs = runs_of(cols);
  if (rows == 1) {
    for (std::int64_t i = 0; i < runs; ++i) vst1q_u16(out + 8 * i, load_activations(x, 8 * i, cols));
    return;
  }
  const int pairs = (rows + 1) / 2;
  for (int p = 0; p < pairs; ++p) {
    const float* a = x + 2 * p * cols;
    for (std::int64_t i = 0; i < runs; ++i) {
      const uint16x8_t first = load_activations(a, 8 * i, cols);
      const uint16x8_t second = 2 * p + 1 < rows ? load_activations(a + cols, 8 * i, cols) : vdupq_n_u16(0);
      store_pair(pair_of(first, second), out + (i * pairs + p) * 8, out + ((runs + i) * pairs + p) * 8);
    }
  }
}

// One row of x against N rows of weights, as they lie.
template <int N>
void multiply_row(const LinearArgs& args, std::int64_t first, std::int64_t distance) {
  const Words* x = reinterpret_cast<const Words*>(args.x);
  const Words* w[N];
  float32x4_t sums[N];
  TREEATTN_UNROLL
  for (int n = 0; n < N; ++n) {
    w[n] = reinterpret_cast<const Words*>(args.w) + (first + n * distance) * args.cols;
    sums[n] = vdupq_n_f32(0.0f);
  }
  std::int64_t col = 0;
  for (; col + 16 <= args.cols; col += 16) {
    const bfloat16x8_t x0 = load8(x + col), x1 = load8(x + col + 8);
    TREEATTN_UNROLL
    for (int n = 0; n < N; ++n) sums[n] = vbfmmlaq_f32(sums[n], x0, load8(w[n] + col));
    TREEATTN_UNROLL
    for (int n = 0; n < N; ++n) sums[n] = vbfmmlaq_f32(sums[n], x1, load8(w[n] + col + 8));
  }
  for (; col < args.cols; col += 8) {
    TREEATTN_UNROLL
    for (int n = 0; n < N; ++n) {
      sums[n] = vbfmmlaq_f32(sums[n], load8(x + col), vreinterpretq_bf16_u16(load_weights(w[n], col, args.cols)));
    }
  }
  TREEATTN_UNROLL
  for (int n = 0; n < N; ++n) {
    put(args.y + first + n * distance, vgetq_lane_f32(sums[n], 0) + vgetq_lane_f32(sums[n], 3), args.add);
  }
}

// Runs [run, run + count) of a panel of weights: [chain][run][pair][row of the pair][4], kPanelWords a chain. Missing
// rows are zeros.
void pack_panel(const LinearArgs& args, std::int64_t first, std::int64_t run, std::int64_t count, Words* out) {
  const Words* rows = reinterpret_cast<const Words*>(args.w);
  for (int p = 0; p < kPanelRows / 2; ++p) {
    const std::int64_t n = first + 2 * p;
    const Words* a = rows + n * args.cols;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t col = 8 * (run + i);
      const uint16x8_t zero = vdupq_n_u16(0);
      store_pair(pair_of(n < args.end ? load_weights(a, col, args.cols) : zero,
                         n + 1 < args.end ? load_weights(a + args.cols, col, args.cols) : zero),
                 out + (i * 4 + p) * 8, out + kPanelWords + (i * 4 + p) * 8);
    }
  }
}

// P pairs of x by four pairs of weights, one chain: sums [P][4] blocks of 2x2.
template <int P>
void multiply_panel(const Words* x, const Words* w, std::int64_t count, float* sums) {
  float32x4_t acc[P][4];
  TREEATTN_UNROLL
  for (int p = 0; p < P; ++p) {
    TREEATTN_UNROLL
    for (int j = 0; j < 4; ++j) acc[p][j] = vld1q_f32(sums + (4 * p + j) * 4);
  }
  for (std::int64_t i = 0; i < count; ++i) {
    bfloat16x8_t b[4];
    TREEATTN_UNROLL
    for (int j = 0; j < 4; ++j) b[j] = load8(w + (4 * i + j) * 8);
    TREEATTN_UNROLL
    for (int p = 0; p < P; ++p) {
      const bfloat16x8_t a = load8(x + (P * i + p) * 8);
      TREEATTN_UNROLL
      for (int j = 0; j < 4; ++j) acc[p][j] = vbfmmlaq_f32(acc[p][j], a, b[j]);
    }
  }
  TREEATTN_UNROLL
  for (int p = 0; p < P; ++p) {
    TREEATTN_UNROLL
    for (int j = 0; j < 4; ++j) vst1q_f32(sums + (4 * p + j) * 4, acc[p][j]);
  }
}

// Rows [row, row + rows) of x, one tile, by rows [first, first + width) of weights: adds the two chains and puts them
// where they belong.
void store_tile(const LinearArgs& args, std::int64_t row, int rows, std::int64_t first, int width, const float* sums) {
  for (int r = 0; r < rows; ++r) {
    float* y = args.y + (row + r) * args.y_stride + first;
    for (int n = 0; n < width; ++n) {
      const float* element = sums + (r / 2 * 4 + n / 2) * 4 + r % 2 * 2 + n % 2;
      put(y + n, element[0] + element[kSums], args.add);
    }
  }
}

// Tiles of two or more rows of x (a last row alone is left out) by the weights [first, first + kLinearBlock).
void multiply_tiles(const LinearArgs& args, std::int64_t first) {
  Words* packed = reinterpret_cast<Words*>(args.scratch);                      // [panel][chain][kPanelWords]
  float* sums = reinterpret_cast<float*>(packed + kPanels * 2 * kPanelWords);  // [tile][panel][chain][kSums]
  const int panels = static_cast<int>((smaller(kLinearBlock, args.end - first) + kPanelRows - 1) / kPanelRows);
  const std::int64_t runs = runs_of(args.cols);
  const auto bytes = static_cast<std::int64_t>(tile_bytes(args.cols));
  const auto sums_of = [&](std::int64_t row, int panel) {
    return sums + (row / kTileRows * kPanels + panel) * 2 * kSums;
  };
  __builtin_memset(sums, 0, sizeof(float) * static_cast<std::size_t>((args.rows + 7) / 8 * kPanels * 2 * kSums));
  for (std::int64_t run = 0; run < runs; run += kDepth) {
    const std::int64_t count = smaller(kDepth, runs - run);
    for (int panel = 0; panel < panels; ++panel) {
      pack_panel(args, first + panel * kPanelRows, run, count, packed + panel * 2 * kPanelWords);
    }
    for (std::int64_t row = 0; row + 1 < args.rows; row += kTileRows) {
      const Words* tile = reinterpret_cast<const Words*>(args.x + row / kTileRows * bytes);
      const std::int64_t pairs = (smaller(kTileRows, args.rows - row) + 1) / 2;
      for (int chain = 0; chain < 2; ++chain) {
        const Words* x = tile + (chain * runs + run) * pairs * 8;
        for (int panel = 0; panel < panels; ++panel) {
          const Words* w = packed + (panel * 2 + chain) * kPanelWords;
          float* out = sums_of(row, panel) + chain * kSums;
          if (pairs == 4) multiply_panel<4>(x, w, count, out);
          if (pairs == 3) multiply_panel<3>(x, w, count, out);
          if (pairs == 2) multiply_panel<2>(x, w, count, out);
          if (pairs == 1) multiply_panel<1>(x, w, count, out);
        }
      }
    }
  }
  for (std::int64_t row = 0; row + 1 < args.rows; row += kTileRows) {
    const int rows = static_cast<int>(smaller(kTileRows, args.rows - row));
    for (int panel = 0; panel < panels; ++panel) {
      const std::int64_t n = first + panel * kPanelRows;
      store_tile(args, row, rows, n, static_cast<int>(smaller(kPanelRows, args.end - n)), sums_of(row, panel));
    }
  }
}

// One tile of P pairs of x by J pairs of weights as they lie, both chains at once: nothing is worth packing for so few.
template <int P, int J>
void multiply_few(const LinearArgs& args, std::int64_t first) {
  const std::int64_t runs = runs_of(args.cols);
  const Words* x = reinterpret_cast<const Words*>(args.x);
  const Words* row[2 * J];
  TREEATTN_UNROLL
  for (int n = 0; n < 2 * J; ++n) {
    row[n] = reinterpret_cast<const Words*>(args.w) + smaller(first + n, args.end - 1) * args.cols;
  }
  float32x4_t even[P][J], odd[P][J];
  TREEATTN_UNROLL
  for (int p = 0; p < P; ++p) {
    TREEATTN_UNROLL
    for (int j = 0; j < J; ++j) even[p][j] = odd[p][j] = vdupq_n_f32(0.0f);
  }
  const auto add_run = [&](std::int64_t i, auto load) __attribute__((always_inline)) {
    TREEATTN_UNROLL
    for (int j = 0; j < J; ++j) {
      const Pair w = pair_of(load(row[2 * j], 8 * i), load(row[2 * j + 1], 8 * i));
      TREEATTN_UNROLL
      for (int p = 0; p < P; ++p) {
        even[p][j] = vbfmmlaq_f32(even[p][j], load8(x + (i * P + p) * 8), vreinterpretq_bf16_u16(w.even));
        odd[p][j] = vbfmmlaq_f32(odd[p][j], load8(x + ((runs + i) * P + p) * 8), vreinterpretq_bf16_u16(w.odd));
      }
    }
  };
  const std::int64_t whole = args.cols / 8;
  for (std::int64_t i = 0; i < whole; ++i)
    add_run(i, [](const Words* w, std::int64_t col) { return vld1q_u16(w + col); });
  if (whole < runs) add_run(whole, [&](const Words* w, std::int64_t col) { return load_weights(w, col, args.cols); });

  float sums[2 * kSums];
  TREEATTN_UNROLL
  for (int p = 0; p < P; ++p) {
    TREEATTN_UNROLL
    for (int j = 0; j < J; ++j) {
      vst1q_f32(sums + (4 * p + j) * 4, even[p][j]);
      vst1q_f32(sums + kSums + (4 * p + j) * 4, odd[p][j]);
    }
  }
  store_tile(args, 0, static_cast<int>(args.rows), first, static_cast<int>(smaller(2 * J, args.end - first)), sums);
}

template <int P, int J>
void multiply_few(const LinearArgs& args) {
  for (std::int64_t n = args.begin; n < args.end; n += 2 * J) multiply_few<P, J>(args, n);
}

void multiply_single(const LinearArgs& args) {
  linear_loops::for_each_stream_step(
      args, [&]<int N>(std::int64_t first, std::int64_t distance) { multiply_row<N>(args, first, distance); });
}

void multiply(const LinearArgs& args) {
  if (args.rows == 1) return multiply_single(args);
  if (args.rows <= 2) return multiply_few<1, 4>(args);
  if (args.rows <= 4) return multiply_few<2, 4>(args);
  if (args.rows <= 6) return multiply_few<3, 2>(args);
  if (args.rows <= 8) return multiply_few<4, 2>(args);
  for (std::int64_t n = args.begin; n < args.end; n += kLinearBlock) multiply_tiles(args, n);
  if (args.rows % kTileRows == 1) multiply_single(linear_loops::last_row(args, kTileRows, tile_bytes(args.cols)));
}

static_assert(kPanels * 2 * kPanelWords * sizeof(Words) +
                  kLinearRows / kTileRows * kPanels * 2 * kSums * sizeof(float) <=
              kLinearScratchBytes);

}  // namespace

void use_neon_linear_bf16(ModelKernels& kernels) {
  kernels.linear[static_cast<int>(DType::kBFloat16)] = {
      Activations::kBFloat16, kTileRows, 4, tile_bytes, pack_tile, multiply, 0x1p-23, true};
}

}  // namespace treeattn::kernels
