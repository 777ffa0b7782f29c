// SPDX-License-Identifier: Apache-2.0
// What the files for linear maps by special instructions share. Everything is static: those files are compiled with
// flags of their own, and a shared inline function could end up in code that must run without them.
#pragma once

#include "kernels/cpu/model_kernels.h"
#include "kernels/cpu/unroll.h"

namespace treeattn::kernels::linear_loops {

// The rows of weights of a call: as the four streams that it names (LinearArgs::stream), else as they lie.
// body.template operator()<N>(first row, distance): rows first, first + distance, ..., N (4 or 1) of them at once.
template <class Body>
static inline void for_each_stream_step(const LinearArgs& args, const Body& body) {
  std::int64_t n = args.begin;
  if (args.stream > 0) {
    for (; n < args.end; ++n) body.template operator()<4>(n, args.stream);
    return;
  }
  for (; n + 4 <= args.end; n += 4) body.template operator()<4>(n, std::int64_t{1});
  for (; n < args.end; ++n) body.template operator()<1>(n, std::int64_t{0});
}

static inline std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

// The last row, alone in its tile.
static inline LinearArgs last_row(const LinearArgs& args, int tile_rows, std::size_t tile_bytes) {
  LinearArgs last = args;
  last.x += (args.rows - 1) / tile_rows * static_cast<std::int64_t>(tile_bytes);
  last.y += (args.rows - 1) * args.y_stride;
  last.rows = 1;
  return last;
}

static inline void put(float* y, float value, bool add) { *y = add ? *y + value : value; }

}  // namespace treeattn::kernels::linear_loops
