// SPDX-License-Identifier: Apache-2.0
// What linear maps of floats and of int8 share where has_neon_dot() is all there is: a few rows of x meet the weights
// as they lie; for many, weights are packed in panels and meet tiles of rows. Static, for the reason in linear_loops.h.
#pragma once

#include "kernels/cpu/linear_loops.h"

namespace treeattn::kernels::neon_dot {

inline constexpr int kTileRows = 4;                // of x, worked on together
inline constexpr std::int64_t kPackFromRows = 16;  // of x: fewer meet the weights as they lie

// Asks for kBytes at p. Rows of weights that are read side by side would be as many streams, and four read two thirds
// of what one does on a Neoverse N1. So weights come into a cache in the order of memory, and are worked on there in
// another. Past the last row that is the next matrix, mostly, or a few lines for nothing.
enum class Level { kFirst, kSecond };
template <int kBytes, Level kLevel = Level::kSecond>
__attribute__((always_inline)) static inline void fetch(const void* p) {
  TREEATTN_UNROLL
  for (int at = 0; at < kBytes; at += 64) {
    __builtin_prefetch(static_cast<const std::byte*>(p) + at, 0, kLevel == Level::kFirst ? 3 : 2);
  }
}

// body.template operator()<R>(first row), R being kTileRows, or what is left.
template <class Body>
static inline void for_each_tile(std::int64_t rows, const Body& body) {
  std::int64_t row = 0;
  for (; row + kTileRows <= rows; row += kTileRows) body.template operator()<kTileRows>(row);
  if (rows - row == 3) body.template operator()<3>(row);
  if (rows - row == 2) body.template operator()<2>(row);
  if (rows - row == 1) body.template operator()<1>(row);
}

// A kernel has
//   kPanelRows                       rows of weights, worked on together
//   kNearPanels                      panels that stay in the first-level cache while all rows of x pass by
//   kDepth                           columns that are worked on before the next weights are packed
//   kPanelBytes                      of kDepth columns of a panel
//   whole(cols)                      columns with those that a panel is filled up with
//   pack_panel(args, first, col, count, panel)
//                                    packs columns [col, col + count) of kPanelRows rows of weights from `first` on
//   multiply_panel<R>(args, row, col, count, panel, sums)
//                                    adds R rows of x, from `row` on, times the panel to sums [R][kPanelRows]
//   multiply_few<R, N>(args, row, first)
//                                    R rows of x by N rows of weights, 4 or 1, as they lie
template <class Kernel>
class Multiplication {
 public:
  static void multiply(const LinearArgs& args) {
    if (args.rows < kPackFromRows) return multiply_few(args);
    for (std::int64_t n = args.begin; n < args.end; n += kLinearBlock) Multiplication(args, n).multiply_block();
  }

 private:
  static constexpr std::int64_t kPanels = kLinearBlock / Kernel::kPanelRows;
  static constexpr std::int64_t kSums = kTileRows * Kernel::kPanelRows;  // of one tile and panel
  static_assert(kPanels * Kernel::kPanelBytes + kLinearRows * kLinearBlock * sizeof(float) <= kLinearScratchBytes);

  static void multiply_few(const LinearArgs& args) {
    linear_loops::for_each_stream_step(args, [&]<int N>(std::int64_t first, std::int64_t) {
      for_each_tile(args.rows, [&]<int R>(std::int64_t row) { Kernel::template multiply_few<R, N>(args, row, first); });
    });
  }

  // All rows of x by the weights [first, first + kLinearBlock).
  Multiplication(const LinearArgs& args, std::int64_t first)
      : args_(args), first_(first), width_(linear_loops::smaller(kLinearBlock, args.end - first)) {}

  void multiply_block() const {
    const std::int64_t cols = Kernel::whole(args_.cols);
    const std::int64_t panels = (width_ + Kernel::kPanelRows - 1) / Kernel::kPanelRows;
    const std::int64_t tiles = (args_.rows + kTileRows - 1) / kTileRows;
    __builtin_memset(sums_of(0, 0), 0, static_cast<std::size_t>(tiles * kPanels * kSums) * sizeof(float));
    for (std::int64_t col = 0; col < cols; col += Kernel::kDepth) {
      const std::int64_t count = linear_loops::smaller(Kernel::kDepth, cols - col);
      for (std::int64_t near = 0; near < panels; near += Kernel::kNearPanels) {
        const std::int64_t end = linear_loops::smaller(near + Kernel::kNearPanels, panels);
        for (std::int64_t panel = near; panel < end; ++panel) {
          Kernel::pack_panel(args_, first_ + panel * Kernel::kPanelRows, col, count, panel_at(panel));
        }
        for_each_tile(args_.rows, [&]<int R>(std::int64_t row) {
          for (std::int64_t panel = near; panel < end; ++panel) {
            Kernel::template multiply_panel<R>(args_, row, col, count, panel_at(panel), sums_of(row, panel));
          }
        });
      }
    }
    for (std::int64_t row = 0; row < args_.rows; ++row) put_row(row);
  }

  std::byte* panel_at(std::int64_t panel) const { return args_.scratch + panel * Kernel::kPanelBytes; }
  float* sums_of(std::int64_t row, std::int64_t panel) const {
    return reinterpret_cast<float*>(args_.scratch + kPanels * Kernel::kPanelBytes) +
           (row / kTileRows * kPanels + panel) * kSums + row % kTileRows * Kernel::kPanelRows;
  }

  void put_row(std::int64_t row) const {
    float* y = args_.y + row * args_.y_stride + first_;
    for (std::int64_t n = 0; n < width_; ++n) {
      linear_loops::put(y + n, sums_of(row, n / Kernel::kPanelRows)[n % Kernel::kPanelRows], args_.add);
    }
  }

  const LinearArgs& args_;
  const std::int64_t first_, width_;
};

}  // namespace treeattn::kernels::neon_dot
