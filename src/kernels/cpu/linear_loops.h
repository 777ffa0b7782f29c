// SPDX-License-Identifier: Apache-2.0
// What the files for linear maps by special instructions share. Everything is static: those files are compiled with
// flags of their own, and a shared inline function could end up in code that must run without them.
#pragma once

#include "kernels/cpu/model_kernels.h"
#include "kernels/cpu/unroll.h"

namespace treeattn::kernels::linear_loops {

// The rows of weights of a call as four sequential streams: one leaves a fifth of the read bandwidth unused. Where the
// call does not say which, its rows are cut into four, an odd number apart: rows of a power of two bytes, an even
// number apart, fall into the same set of the first-level cache and push x out of it. body.template
// operator()<N>(first row, distance): rows first, first + distance, ..., N (4 or 1) of them at once.
template <class Body>
static inline void for_each_stream_step(const LinearArgs& args, const Body& body) {
  const std::int64_t quarter = (args.end - args.begin) / 4, odd = quarter - (quarter % 2 == 0 && quarter > 0);
  const bool given = args.stream > 0;
  const std::int64_t distance = given ? args.stream : odd, steps = given ? args.end - args.begin : odd;
  for (std::int64_t i = 0; i < steps; ++i) body.template operator()<4>(args.begin + i, distance);
  if (given) return;
  std::int64_t n = args.begin + 4 * steps;
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
