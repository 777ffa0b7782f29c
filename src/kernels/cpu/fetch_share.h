// SPDX-License-Identifier: Apache-2.0
// Fetching ahead where many rows share a tile.
#pragma once

#include "kernels/cpu/tile_ops.h"
#include "kernels/cpu/unroll.h"

namespace treeattn::kernels {

// Of the rows that are wanted next, the share that falls to parts [part, part + kParts) of the work on a tile. Packing,
// or converting, reads a whole tile at once: from further away than the second level it would wait. Static, and inlined
// by force, for the reasons in unroll.h.
template <int kParts>
TREEATTN_FORCE_INLINE static inline void fetch_share(const Ahead& ahead, int part, int parts) {
  if (!ahead.rows) return;
  const int end = part + kParts < parts ? kTileTokens * (part + kParts) / parts : kTileTokens;
  for (int t = kTileTokens * part / parts; t < end; ++t) {
    for (int at = 0; at < ahead.row_bytes; at += 64) __builtin_prefetch(ahead.rows[t] + at, 0, 2);
  }
}

}  // namespace treeattn::kernels
