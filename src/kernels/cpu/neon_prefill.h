// SPDX-License-Identifier: Apache-2.0
// What the NEON kernels for many rows to a head have in common. Static, for the reason in neon_loops.h.
#pragma once

#include "kernels/cpu/neon_loops.h"

namespace treeattn::kernels::neon {

// Of the rows that are wanted next, the share that falls to query rows [r, r + kRows). Packing, or converting, reads a
// whole tile at once: from further away than the second level it would wait.
template <int kRows>
TREEATTN_FORCE_INLINE static inline void fetch_share(const Ahead& ahead, int r, int rows) {
  if (!ahead.rows) return;
  const int count = kTileTokens / kTokenBlock * ahead.rows_per_four;
  const int end = r + kRows < rows ? count * (r + kRows) / rows : count;
  for (int t = count * r / rows; t < end; ++t) {
    for (int at = 0; at < ahead.row_bytes; at += 64) __builtin_prefetch(ahead.rows[t] + at, 0, 2);
  }
}

}  // namespace treeattn::kernels::neon
