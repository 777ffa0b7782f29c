// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/row_parts.h"

#include <algorithm>

#include "base/round_up.h"

namespace treeattn::kernels {
namespace {

constexpr std::int64_t kBlockBytes = 256 << 10;  // of weights: least that is worth a thread, most that one waits for
constexpr std::int64_t kPanelRows = 16;          // that kernels with one stream take together

}  // namespace

RowParts::RowParts(std::span<const Projection> maps, int streams, int threads) : maps_(maps), streams_(streams) {
  std::int64_t rows = 0;
  for (const Projection& map : maps) rows += map.w.rows;
  const std::int64_t row_bytes = maps[0].w.cols * static_cast<std::int64_t>(dtype_size(maps[0].w.dtype));
  seats_ = static_cast<int>(std::clamp<std::int64_t>(rows * row_bytes / kBlockBytes, 1, threads));
  // What goes together: a row of each stream, or a panel.
  const std::int64_t step = streams > 1 ? streams : kPanelRows;
  const std::int64_t steps_of_block = std::max<std::int64_t>(1, kBlockBytes / (step * row_bytes));
  block_ = streams > 1 ? steps_of_block : steps_of_block * kPanelRows;
  parts_ = std::make_unique<Part[]>(maps.size() * static_cast<std::size_t>(seats_));
  for (std::size_t m = 0; m < maps.size(); ++m) {
    const std::int64_t all = maps[m].w.rows, steps = all / step;
    std::int64_t begin = 0;
    for (int seat = 0; seat < seats_; ++seat) {
      const bool last = seat + 1 == seats_;
      std::int64_t end = std::max(begin, steps * (seat + 1) / seats_);
      // An odd number of rows: rows of a power of two bytes, an even number apart, fall into the same set of the
      // first-level cache and push x out of it.
      if ((end - begin) % 2 == 0 && end < steps) ++end;
      Part& part = part_of(m, seat);
      part.begin = begin * step;
      part.end = last ? all : end * step;
      part.length = streams > 1 ? end - begin - (last && (end - begin) % 2 == 0 && end > begin) : part.end - part.begin;
      part.blocks = base::divide_up(part.length, block_) + (streams * part.length < part.end - part.begin);
      begin = end;
    }
  }
}

RowParts::Rows RowParts::rows_of(const Part& part, std::int64_t block) const {
  const std::int64_t first = part.begin + block * block_, end = part.begin + part.length;
  if (first >= end) return {part.begin + streams_ * part.length, part.end, 0};  // what does not fill the streams
  return {first, std::min(first + block_, end), streams_ > 1 ? part.length : 0};
}

}  // namespace treeattn::kernels
