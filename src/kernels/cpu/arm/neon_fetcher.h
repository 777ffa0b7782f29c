// SPDX-License-Identifier: Apache-2.0
// Rows on their way from memory, in the order of memory, for kernels whose own order is another. Inlined by force, for
// the reasons in unroll.h.
#pragma once

#include "kernels/cpu/arm/neon_loops.h"

namespace treeattn::kernels::neon {

// Rows of tokens, each with all heads.
struct TokenRows {
  const std::byte* const* rows = nullptr;
  int count = 0;
  std::ptrdiff_t bytes = 0;  // of one
};

// Rows [begin, end) of a table, heads of row_bytes each; none where a token's heads do not lie side by side.
TREEATTN_FORCE_INLINE static inline TokenRows token_rows(const std::byte* const* rows, int begin, int end, int heads,
                                                         std::ptrdiff_t head_bytes, std::ptrdiff_t row_bytes) {
  if (!rows || (heads > 1 && head_bytes != row_bytes)) return {};
  return {rows + begin, end - begin, heads * row_bytes};
}

// How many tokens before they are used rows are fetched, in the order of their use. The second level of a Neoverse N1
// soon gives up what was fetched into it and not used: of 128 KiB a quarter was gone (docs/cpu_notes.md).
TREEATTN_FORCE_INLINE static inline int tokens_ahead(std::ptrdiff_t token_bytes) {
  constexpr int kBytes = 32 << 10, kLeast = kTileTokens / 4, kMost = kTileTokens / 2;
  int tokens = kMost;
  while (tokens > kLeast && tokens * token_bytes > kBytes) tokens /= 2;
  return tokens;
}

// Brings rows into the second level while a tile is worked on, at an even rate.
class Fetcher {
 public:
  TREEATTN_FORCE_INLINE Fetcher(const TokenRows& first, const TokenRows& second, int steps)
      : now_(first), then_(second) {
    const auto fetches = [](const TokenRows& rows) { return rows.count * ((rows.bytes + kBytes - 1) / kBytes); };
    each_ = static_cast<int>((fetches(first) + fetches(second) + steps - 1) / steps);
    next_row();
  }

  // To be called so many times as were said to be steps.
  TREEATTN_FORCE_INLINE void step() {
    for (int i = 0; i < each_; ++i) {
      __builtin_prefetch(at_, 0, 2);
      __builtin_prefetch(at_ + kBytes / 2, 0, 2);
      at_ += kBytes;
      if (at_ >= end_) next_row();
    }
  }

 private:
  static constexpr int kBytes = 128;  // at a time: two lines

  TREEATTN_FORCE_INLINE void next_row() {
    if (now_.count == 0) now_ = then_, then_.count = 0;
    if (now_.count == 0) {
      each_ = 0;
      return;
    }
    at_ = *now_.rows++, end_ = at_ + now_.bytes;
    --now_.count;
  }

  const std::byte* at_ = nullptr;
  const std::byte* end_ = nullptr;  // of the row at_ is in
  int each_;                        // fetches a step
  TokenRows now_, then_;            // after that row
};

}  // namespace treeattn::kernels::neon
