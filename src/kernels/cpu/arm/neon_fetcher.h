// SPDX-License-Identifier: Apache-2.0
// Rows on their way from memory, in the order of memory, for kernels whose own order is another. Inlined by force, for
// the reasons in neon_loops.h.
#pragma once

#include "kernels/cpu/arm/neon_loops.h"

namespace treeattn::kernels::neon {

// Brings rows into the second level, in the order in which memory is fastest: four rows side by side, which belong to
// four streams, each from its first head to its last.
class Fetcher {
 public:
  TREEATTN_FORCE_INLINE Fetcher(const Ahead& first, const Ahead& second, int heads, int steps)
      : now_(rows_of(first, heads)), then_(rows_of(second, heads)) {
    const auto fetches = [](const Rows& rows) {
      return (rows.end - rows.next) / 4 * ((rows.bytes + kBytes - 1) / kBytes);
    };
    fetches_ = static_cast<int>(fetches(now_) + fetches(then_)), steps_ = steps;
    if (now_.next == now_.end) now_ = then_, then_.next = then_.end;
  }

  // To be called so many times as were said to be steps.
  TREEATTN_FORCE_INLINE void step() {
    for (due_ += fetches_; due_ >= steps_; due_ -= steps_) {
      if (now_.next == now_.end) return;
      TREEATTN_UNROLL
      for (int r = 0; r < 4; ++r) {
        __builtin_prefetch(now_.next[r] + offset_, 0, 2);
        __builtin_prefetch(now_.next[r] + offset_ + 64, 0, 2);
      }
      offset_ += kBytes;
      if (offset_ < now_.bytes) continue;
      offset_ = 0;
      now_.next += 4;
      if (now_.next == now_.end) now_ = then_, then_.next = then_.end;
    }
  }

 private:
  static constexpr int kBytes = 128;  // of a row at a time: two lines
  struct Rows {
    const std::byte* const* next = nullptr;
    const std::byte* const* end = nullptr;
    std::ptrdiff_t bytes = 0;  // of all heads
  };

  TREEATTN_FORCE_INLINE static Rows rows_of(const Ahead& ahead, int heads) {
    if (!ahead.rows || (heads > 1 && ahead.head_bytes != ahead.row_bytes)) return {};
    return {ahead.rows, ahead.rows + kTileTokens / 4 * ahead.rows_per_four, heads * std::ptrdiff_t{ahead.row_bytes}};
  }

  Rows now_, then_;
  std::ptrdiff_t offset_ = 0;
  int fetches_, steps_, due_ = 0;  // a step brings its share of all fetches
};

}  // namespace treeattn::kernels::neon
