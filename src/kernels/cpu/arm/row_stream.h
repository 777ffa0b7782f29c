// SPDX-License-Identifier: Apache-2.0
// Rows on their way from memory, for kernels that take a few tokens at a time with all heads of those: fetched at an
// even rate and, as far as they lie so, as sequential streams. Inlined by force, for the reasons in unroll.h.
#pragma once

#include "kernels/cpu/tile_ops.h"
#include "kernels/cpu/unroll.h"

namespace treeattn::kernels {

// How far ahead of the work, and into which cache: 3 the first level, 2 the second.
struct FetchDistance {
  int bytes;
  int most_tokens;  // less than a tile
  int locality;
};

// What comes while one head of a few tokens is worked on: as many lines, one after the other.
template <int kLocality, int kTokens>
struct Coming {
  static constexpr int kLineBytes = 64;
  const std::byte* line;
  std::ptrdiff_t moves = -1;  // 0: nothing comes, and the line is one at hand

  // What goes with so many bytes of each of the rows at work.
  template <int kBytes>
  TREEATTN_FORCE_INLINE void fetch() {
    constexpr int kAll = kTokens * kBytes;
    constexpr std::ptrdiff_t kStep = kAll < kLineBytes ? kAll : kLineBytes;
    TREEATTN_UNROLL
    for (int i = 0; i < kAll; i += kLineBytes) {
      __builtin_prefetch(line, 0, kLocality);
      line += kStep & moves;
    }
  }
};

// The rows of a tile and, behind them, those that are wanted next, kTokens at a time. Those that lie so far behind the
// ones at work are fetched as they lie in memory, the first with all its heads, then the second: side by side, as they
// are worked on, they would be as many streams.
template <FetchDistance kDistance, int kTokens = kTokenBlock>
class RowStream {
 public:
  using Lines = Coming<kDistance.locality, kTokens>;

  TREEATTN_FORCE_INLINE RowStream(const TileRows& own, int tokens, const Ahead& next, int heads, int row_bytes)
      : own_(own),
        next_(next.row_bytes == row_bytes && next.head_bytes == own.head_bytes ? next.rows : nullptr),
        tokens_(tokens),
        heads_(heads),
        row_bytes_(row_bytes),
        side_by_side_(heads == 1 || own.head_bytes == row_bytes) {
    constexpr int kMostBlocks = kDistance.most_tokens / kTokens;
    const int blocks = kDistance.bytes / (kTokens * heads * row_bytes);
    ahead_ = kTokens * (blocks < 1 ? 1 : blocks < kMostBlocks ? blocks : kMostBlocks);
  }

  // Tokens [t, t + kTokens) are next.
  TREEATTN_FORCE_INLINE void begin(int t) {
    const int at = t + ahead_;
    rows_ = at + kTokens <= tokens_ ? own_.rows + at : at >= tokens_ && next_ ? next_ + (at - tokens_) : nullptr;
    at_hand_ = own_.rows[t];
    const std::ptrdiff_t all_heads = std::ptrdiff_t{heads_} * row_bytes_;
    one_run_ = rows_ && side_by_side_ && rows_[kTokens - 1] - rows_[0] == (kTokens - 1) * all_heads;
    of_one_head_ = rows_ && !one_run_ ? run_of_one_head(at < tokens_ ? at : at - tokens_) : nullptr;
  }

  // Of these, head h.
  TREEATTN_FORCE_INLINE Lines with_head(int h) const {
    const std::ptrdiff_t share = kTokens * row_bytes_;  // of a head in all that comes with the tokens
    if (!rows_) return {at_hand_, 0};
    if (one_run_) return {rows_[0] + h * share};
    if (of_one_head_) return {of_one_head_ + h * own_.head_bytes};
    const int heads_a_row = heads_ / kTokens;  // at work while one row comes
    if (side_by_side_ && heads_ % kTokens == 0) return {rows_[h / heads_a_row] + h % heads_a_row * share};
    constexpr int kLocality = kDistance.locality;  // without -O GCC takes no member for a constant
    for (int i = 0; i < kTokens; ++i) {
      const std::byte* row = rows_[i] + h * own_.head_bytes;
      for (int at = 0; at < row_bytes_; at += Lines::kLineBytes) __builtin_prefetch(row + at, 0, kLocality);
    }
    return {at_hand_, 0};
  }

 private:
  // Where tokens of one head lie side by side: those of the block, or, if it takes a few from each of four streams, as
  // many from one of them, the next block from the next. `index` is that of rows_ in its table.
  TREEATTN_FORCE_INLINE const std::byte* run_of_one_head(int index) const {
    const std::ptrdiff_t run = (kTokens - 1) * row_bytes_;
    if (rows_[kTokens - 1] - rows_[0] == run) return rows_[0];
    constexpr int kStreams = 4, kTurn = kStreams * kTokens;
    const int turn = index % kTurn / kTokens, first = index - turn * kTokens;
    if (ahead_ < kTurn || first + kTurn > tokens_) return nullptr;
    const std::byte* const* rows = rows_ - turn * kTokens + turn;
    return rows[kTurn - kStreams] - rows[0] == run ? rows[0] : nullptr;
  }

  const TileRows own_;
  const std::byte* const* const next_;
  const int tokens_, heads_, row_bytes_;
  const bool side_by_side_;
  int ahead_;  // tokens
  const std::byte* const* rows_ = nullptr;
  const std::byte* at_hand_ = nullptr;
  bool one_run_ = false;                    // the block's tokens, with all heads
  const std::byte* of_one_head_ = nullptr;  // as much of the first head, and of the others where they lie
};

}  // namespace treeattn::kernels
