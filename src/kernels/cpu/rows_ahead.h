// SPDX-License-Identifier: Apache-2.0
// Rows on their way from memory on x86-64, for kernels that take kTokenBlock tokens at a time with all heads of those:
// fetched into the first level, row by row as they will be read. What made the difference (docs/cpu_notes.md): no two
// rows at work share a page (TileOps::streams_of_short_rows); what is fetched is as near as memory allows; and it is in
// the order of the reads, head by head. Inlined by force, for the reasons in unroll.h.
#pragma once

#include <cstddef>

#include "kernels/cpu/tile_ops.h"
#include "kernels/cpu/unroll.h"

namespace treeattn::kernels {

class RowsAhead {
 public:
  static constexpr int kBytes = 8 << 10;  // so far ahead, at least by the rows of one head

  TREEATTN_FORCE_INLINE RowsAhead(const TileRows& own, int tokens, const Ahead& next, int heads, int row_bytes)
      : own_(own),
        next_(next.row_bytes == row_bytes && next.head_bytes == own.head_bytes ? next.rows : nullptr),
        tokens_(tokens),
        heads_(heads) {
    constexpr int kMostBlocks = kTileTokens / kTokenBlock - 2;
    const int asked = kBytes / (kTokenBlock * row_bytes);
    const int lead = asked < 1 ? 1 : asked;  // times a block's rows of one head
    blocks_ = lead / heads < kMostBlocks ? lead / heads : kMostBlocks;
    same_block_ = heads - lead % heads;
  }

  // Tokens [t, t + kTokenBlock) are next.
  TREEATTN_FORCE_INLINE void begin(int t) {
    at_hand_ = own_.rows[t];
    first_ = behind(t + blocks_ * kTokenBlock, heads_ - same_block_);
    last_ = behind(t + (blocks_ + 1) * kTokenBlock, -same_block_);
  }

  // Where what is to be fetched lies, seen from the rows of head h. The block's other tokens lie there as its first
  // does, but for pages of less than a block.
  TREEATTN_FORCE_INLINE std::ptrdiff_t with_head(int h) const { return h < same_block_ ? first_ : last_; }

 private:
  // From the block's rows to those at `t`, in the tile or in what is wanted next, so many heads further.
  TREEATTN_FORCE_INLINE std::ptrdiff_t behind(int t, int heads) const {
    const std::byte* row = t < tokens_ ? own_.rows[t] : next_ ? next_[t - tokens_] : at_hand_;
    return row - at_hand_ + heads * own_.head_bytes;
  }

  const TileRows own_;
  const std::byte* const* const next_;
  const int tokens_, heads_;
  int blocks_, same_block_;  // heads below it are followed by rows `blocks_` further, the others by those one more
  const std::byte* at_hand_ = nullptr;
  std::ptrdiff_t first_ = 0, last_ = 0;
};

}  // namespace treeattn::kernels
