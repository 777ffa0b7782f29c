// SPDX-License-Identifier: Apache-2.0
// Linear maps with bfloat16 weights by TDPBF16PS, which multiplies 16 rows of 32 weights with up to 16 rows of x. x is
// rounded to bfloat16. The instruction rounds every addition to nearest even and takes subnormal numbers for zero.
//
// The order of the sum: the columns are cut into runs of 32. Within a run the instruction adds up as it does; the runs
// are added one after the other. An element of y depends on its own row of x and of weights alone, so one row of x is
// no special case, but for this: it needs no packing, and the weights go into the tiles as they lie.
#include "kernels/cpu/targets.h"
#include "kernels/cpu/x86/amx_tiles.h"
#include "kernels/cpu/x86/avx512_vectors.h"

namespace treeattn::kernels {
namespace {

using amx::kTileBytes;  // of a run of 16 rows
using linear_loops::smaller;

constexpr int kTileRows = amx::kRows;   // of x
constexpr int kPanelRows = amx::kRows;  // of weights
constexpr int kPanels = kLinearBlock / kPanelRows;
constexpr std::int64_t kRun = 32;
constexpr std::int64_t kRunBytes = amx::kRowBytes;       // of a row
constexpr std::int64_t kDepth = 16;                      // runs that are worked on before the next are packed
constexpr std::int64_t kSums = amx::kRows * amx::kRows;  // of one tile of x and one panel

// Registers. Sums are [panel][tile of x].
constexpr int kSum = 0, kWeights = 4, kX = 6;

std::int64_t runs_of(std::int64_t cols) { return (cols + kRun - 1) / kRun; }
std::size_t tile_bytes(std::int64_t cols) { return static_cast<std::size_t>(runs_of(cols) * kTileBytes); }

// One row stays as it is. More become [run][pair of columns][row][2], zeros standing for missing rows.
void pack_tile(const float* x, int rows, std::int64_t cols, std::byte* packed) {
  if (rows == 1) {
    for (std::int64_t col = 0; col < cols; col += kRun, packed += kRunBytes) {
      _mm512_store_si512(packed, avx512::to_bfloat16(x + col, cols - col));
    }
    return;
  }
  for (std::int64_t col = 0; col < cols; col += kRun, packed += kTileBytes) {
    __m512i v[kTileRows];
    for (int r = 0; r < kTileRows; ++r) {
      v[r] = r < rows ? avx512::to_bfloat16(x + r * cols + col, cols - col) : _mm512_setzero_si512();
    }
    avx512::transpose(v);
    TREEATTN_UNROLL
    for (int i = 0; i < 16; ++i) _mm512_store_si512(packed + kRunBytes * i, v[i]);
  }
}

const std::byte* weight_row(const LinearArgs& args, std::int64_t n) { return args.w + n * args.cols * 2; }

// Runs [run, run + count) of rows [first, first + rows) of the weights: [run][row], zeros beyond the last column. Row
// by row, as they lie in memory.
void copy_runs(const LinearArgs& args, std::int64_t first, std::int64_t rows, std::int64_t run, std::int64_t count,
               std::byte* out) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::byte* row = weight_row(args, first + r);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t at = (run + i) * kRunBytes;
      _mm512_store_si512(out + i * kTileBytes + r * kRunBytes, avx512::load_bytes(row + at, args.cols * 2 - at));
    }
  }
}

// One row of x by 16 rows of weights at a time, or what is left of them.
void multiply_panels(const LinearArgs& args, std::int64_t begin, std::int64_t end, std::int64_t rows) {
  amx::TileShapes shapes;
  shapes.set(kSum, rows, 4);
  for (const int i : {0, 1}) shapes.set(kWeights + i, rows, kRunBytes), shapes.set(kX + i, kRun / 2, 4);
  amx::Tiles tiles(shapes);
  const std::int64_t stride = args.cols * 2, whole = args.cols / kRun;
  for (std::int64_t first = begin; first < end; first += rows) {
    const std::byte* w = weight_row(args, first);
    const auto add_run = [&]<int I>(std::int64_t run) __attribute__((always_inline)) {
      tiles.load<kX + I>(args.x + run * kRunBytes, 4);
      const std::byte* ahead = w + avx512::bytes_ahead(run * kRunBytes, stride);
      TREEATTN_UNROLL
      for (int n = 0; n < kPanelRows; ++n) _mm_prefetch(ahead + n * stride, _MM_HINT_T0);
      tiles.load<kWeights + I>(w + run * kRunBytes, stride);
      tiles.add_bfloat16_products<kSum, kWeights + I, kX + I>();
    };
    tiles.zero<kSum>();
    std::int64_t run = 0;
    for (; run + 2 <= whole; run += 2) add_run.operator()<0>(run), add_run.operator()<1>(run + 1);
    if (run < whole) add_run.operator()<0>(run);
    if (whole < runs_of(args.cols)) {
      alignas(64) std::byte last[kTileBytes];
      copy_runs(args, first, rows, whole, 1, last);
      tiles.load<kX>(args.x + whole * kRunBytes, 4);
      tiles.load<kWeights>(last, kRunBytes);
      tiles.add_bfloat16_products<kSum, kWeights, kX>();
    }
    alignas(64) float sums[kPanelRows];
    tiles.store<kSum>(sums, 4);
    avx512::put(args.y + first, rows, _mm512_maskz_load_ps(avx512::first_lanes(rows), sums), args.add);
  }
}

void multiply_single(const LinearArgs& args) {
  const std::int64_t end = args.begin + (args.end - args.begin) / kPanelRows * kPanelRows;
  if (args.begin < end) multiply_panels(args, args.begin, end, kPanelRows);
  if (end < args.end) multiply_panels(args, end, args.end, args.end - end);
}

// P tiles of x by J packed panels: sums [tile][panel][kSums], each [row of weights][row of x].
template <int J, int P>
void multiply_block(amx::Tiles& tiles, const std::byte* w, const std::byte* x, std::int64_t x_bytes, std::int64_t count,
                    float* sums, bool fresh) {
  const auto at = [&](int panel, int tile) { return sums + (tile * kPanels + panel) * kSums; };
  amx::for_each_sum<J, P>(
      [&]<int I>(int panel, int tile) { fresh ? tiles.zero<I>() : tiles.load<I>(at(panel, tile), kRunBytes); });
  amx::add_bfloat16_products<J, P>(tiles, w, kDepth * kTileBytes, x, x_bytes, count);
  amx::for_each_sum<J, P>([&]<int I>(int panel, int tile) { tiles.store<I>(at(panel, tile), kRunBytes); });
}

// The sums of one tile and one panel to where they belong.
void store_sums(const LinearArgs& args, std::int64_t row, std::int64_t rows, std::int64_t first, const float* sums) {
  __m512i v[kPanelRows];
  TREEATTN_UNROLL
  for (int n = 0; n < kPanelRows; ++n) v[n] = _mm512_load_si512(sums + n * kTileRows);
  avx512::transpose(v);
  alignas(64) float turned[kTileRows][kPanelRows];
  TREEATTN_UNROLL
  for (int r = 0; r < kTileRows; ++r) _mm512_store_si512(turned[r], v[r]);
  for (std::int64_t r = 0; r < rows; ++r) {
    avx512::put(args.y + (row + r) * args.y_stride + first, args.end - first, _mm512_load_ps(turned[r]), args.add);
  }
}

// The first `rows` rows of x by the weights [first, first + kLinearBlock).
void multiply_tiles(amx::Tiles& tiles, const LinearArgs& args, std::int64_t rows, std::int64_t first) {
  std::byte* packed = args.scratch;                                                      // [panel][run]
  float* sums = reinterpret_cast<float*>(args.scratch + kPanels * kDepth * kTileBytes);  // [tile][panel][kSums]
  const std::int64_t width = smaller(kLinearBlock, args.end - first);
  const std::int64_t panels = (width + kPanelRows - 1) / kPanelRows, count_tiles = (rows + kTileRows - 1) / kTileRows;
  const std::int64_t runs = runs_of(args.cols);
  const auto x_bytes = static_cast<std::int64_t>(tile_bytes(args.cols));
  for (std::int64_t run = 0; run < runs; run += kDepth) {
    const std::int64_t count = smaller(kDepth, runs - run);
    for (std::int64_t panel = 0; panel < panels; ++panel) {
      copy_runs(args, first + panel * kPanelRows, smaller(kPanelRows, width - panel * kPanelRows), run, count,
                packed + panel * kDepth * kTileBytes);
    }
    for (std::int64_t panel = 0; panel < panels; panel += 2) {
      const std::byte* w = packed + panel * kDepth * kTileBytes;
      for (std::int64_t tile = 0; tile < count_tiles; tile += 2) {
        const std::byte* x = args.x + tile * x_bytes + run * kTileBytes;
        float* out = sums + (tile * kPanels + panel) * kSums;
        const bool one_panel = panel + 1 == panels, one_tile = tile + 1 == count_tiles, fresh = run == 0;
        if (one_panel && one_tile) multiply_block<1, 1>(tiles, w, x, x_bytes, count, out, fresh);
        if (one_panel && !one_tile) multiply_block<1, 2>(tiles, w, x, x_bytes, count, out, fresh);
        if (!one_panel && one_tile) multiply_block<2, 1>(tiles, w, x, x_bytes, count, out, fresh);
        if (!one_panel && !one_tile) multiply_block<2, 2>(tiles, w, x, x_bytes, count, out, fresh);
      }
    }
  }
  for (std::int64_t tile = 0; tile < count_tiles; ++tile) {
    for (std::int64_t panel = 0; panel < panels; ++panel) {
      const std::int64_t row = tile * kTileRows;
      store_sums(args, row, smaller(kTileRows, rows - row), first + panel * kPanelRows,
                 sums + (tile * kPanels + panel) * kSums);
    }
  }
}

void multiply(const LinearArgs& args) {
  if (args.rows == 1) return multiply_single(args);
  const bool last_alone = args.rows % kTileRows == 1;
  {
    amx::Tiles tiles(amx::TileShapes::whole());
    for (std::int64_t n = args.begin; n < args.end; n += kLinearBlock) {
      multiply_tiles(tiles, args, args.rows - last_alone, n);
    }
  }
  if (last_alone) multiply_single(linear_loops::last_row(args, kTileRows, tile_bytes(args.cols)));
}

static_assert(kPanels * kDepth * kTileBytes + kLinearRows / kTileRows * kPanels * kSums * sizeof(float) <=
              kLinearScratchBytes);

}  // namespace

void use_amx_linear_bf16(ModelKernels& kernels) {
  kernels.linear[static_cast<int>(DType::kBFloat16)] = {
      Activations::kBFloat16, kTileRows, 1, tile_bytes, pack_tile, multiply, 0x1p-24, true};
}

}  // namespace treeattn::kernels
