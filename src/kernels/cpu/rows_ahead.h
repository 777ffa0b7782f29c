// SPDX-License-Identifier: Apache-2.0
// Rows on their way from memory on x86-64, for kernels that take a block of tokens at a time with all heads of those:
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
  static constexpr int kBytes = 4 << 10;  // so far ahead, at least by the rows of one head

  TREEATTN_FORCE_INLINE RowsAhead(const TileRows& own, int tokens, const Ahead& next, int heads, int row_bytes,
                                  int block = kTokenBlock)
      : own_(own),
        next_(next.row_bytes == row_bytes && next.head_bytes == own.head_bytes ? next.rows : nullptr),
        tokens_(tokens),
        heads_(heads),
        block_(block) {
    const int last = kTileTokens / block - 1, asked = kBytes / (block * row_bytes);
    const int lead = asked < 1 ? 1 : asked;  // times a block's rows of one head
    token_ = (lead / heads < last ? lead / heads : last) * block;
    head_ = lead % heads;
  }

  // Tokens [t, t + block) are next, head by head.
  TREEATTN_FORCE_INLINE void begin(int t) { at_hand_ = own_.rows[t]; }

  // Where what is to be fetched lies, seen from the rows of head h. The block's other tokens lie there as its first
  // does, if there are streams; if not, it is off, and something else is fetched. To be called for all heads in turn.
  TREEATTN_FORCE_INLINE std::ptrdiff_t with_head(int h) {
    const std::byte* const* rows = token_ < tokens_ ? own_.rows + token_ : next_ ? next_ + token_ - tokens_ : nullptr;
    const std::ptrdiff_t behind = rows ? *rows - at_hand_ + (head_ - h) * own_.head_bytes : 0;
    if (++head_ == heads_) {
      head_ = 0;
      token_ += block_;
    }
    return behind;
  }

 private:
  const TileRows own_;
  const std::byte* const* const next_;
  const int tokens_, heads_, block_;
  int token_, head_;  // to be fetched
  const std::byte* at_hand_ = nullptr;
};

}  // namespace treeattn::kernels
