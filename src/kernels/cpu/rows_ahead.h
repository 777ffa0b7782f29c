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
  TREEATTN_FORCE_INLINE void begin(int t) {
    const std::byte* const at_hand = own_.rows[t];
    before_wrap_ = behind(at_hand, t + token_, head_);
    after_wrap_ = behind(at_hand, t + token_ + block_, head_ - heads_);
  }

  // Where what is to be fetched lies, seen from the rows of head h. The block's other tokens lie there as its first
  // does, if there are streams; if not, it is off, and something else is fetched.
  TREEATTN_FORCE_INLINE std::ptrdiff_t with_head(int h) const {
    return h + head_ < heads_ ? before_wrap_ : after_wrap_;
  }

 private:
  TREEATTN_FORCE_INLINE std::ptrdiff_t behind(const std::byte* at_hand, int token, int heads) const {
    const std::byte* const* rows = token < tokens_ ? own_.rows + token : next_ ? next_ + token - tokens_ : nullptr;
    return rows ? *rows - at_hand + heads * own_.head_bytes : 0;
  }

  const TileRows own_;
  const std::byte* const* const next_;
  const int tokens_, heads_, block_;
  int token_, head_;  // so far ahead
  std::ptrdiff_t before_wrap_ = 0, after_wrap_ = 0;
};

}  // namespace treeattn::kernels
