// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/linear.h"

#include <algorithm>

#include "base/check.h"
#include "base/round_up.h"
#include "kernels/cpu/row_parts.h"

namespace treeattn::kernels {
namespace {

constexpr std::int64_t kPackedRows = 2 * kLinearRows;  // of x, packed at once
constexpr std::int64_t kPackAlone = 1 << 15;           // elements of x; fewer are packed faster than a thread starts

}  // namespace

LinearMap::LinearMap(const ModelKernels& kernels, ThreadPool& pool)
    : kernels_(kernels), pool_(pool), scratch_(kLinearScratchBytes * static_cast<std::size_t>(pool.size())) {}

void LinearMap::pack(const LinearOps& ops, const float* x, std::int64_t rows, std::int64_t cols) {
  const auto bytes = static_cast<std::int64_t>(ops.tile_bytes(cols));
  const std::int64_t tiles = base::divide_up(rows, ops.tile_rows);
  if (packed_.bytes() < static_cast<std::size_t>(bytes * tiles)) {
    packed_ = base::Buffer();  // first, so that both are not there at once
    packed_ = base::Buffer(static_cast<std::size_t>(bytes * tiles));
  }
  const auto pack_tile = [&](std::size_t tile, int) {
    const auto row = static_cast<std::int64_t>(tile) * ops.tile_rows;
    ops.pack_tile(x + row * cols, static_cast<int>(std::min<std::int64_t>(ops.tile_rows, rows - row)), cols,
                  packed_.as<std::byte>() + static_cast<std::int64_t>(tile) * bytes);
  };
  if (rows * cols >= kPackAlone && tiles > 1) {
    pool_.run(static_cast<std::size_t>(tiles), pack_tile);
  } else {
    for (std::int64_t tile = 0; tile < tiles; ++tile) pack_tile(static_cast<std::size_t>(tile), 0);
  }
}

// For row `row` of y and those after it, from the first packed row on.
LinearArgs LinearMap::args_of(const Projection& map, std::int64_t row, int thread, bool add) {
  LinearArgs args;
  args.x = packed_.as<std::byte>();
  args.rows = 1;
  args.cols = map.w.cols;
  args.w = static_cast<const std::byte*>(map.w.data);
  args.scales = map.w.scales;
  args.y = map.y + row * map.w.rows;
  args.y_stride = map.w.rows;
  args.add = add;
  args.scratch = scratch_.as<std::byte>() + static_cast<std::size_t>(thread) * kLinearScratchBytes;
  return args;
}

// Row `row` of x, packed: all maps in one go.
void LinearMap::multiply_row(const LinearOps& ops, std::span<const Projection> maps, std::int64_t row, bool add) {
  RowParts parts(maps, ops.streams, pool_.size());
  pool_.run(static_cast<std::size_t>(parts.seats()), [&](std::size_t seat, int thread) {
    parts.work(static_cast<int>(seat), [&](const Projection& map, const RowParts::Rows& rows) {
      LinearArgs args = args_of(map, row, thread, add);
      args.begin = rows.begin;
      args.end = rows.end;
      args.stream = rows.stream;
      ops.multiply(args);
    });
  });
}

// Rows [first, first + rows) of x, packed. Tasks that share weights are neighbours, so that what one thread has read
// another finds in the shared cache.
void LinearMap::multiply_rows(const LinearOps& ops, const Projection& map, std::int64_t first, std::int64_t rows,
                              bool add) {
  const std::int64_t blocks = base::divide_up(rows, kLinearRows);
  const auto tile_bytes = static_cast<std::int64_t>(ops.tile_bytes(map.w.cols));
  pool_.run(static_cast<std::size_t>(base::divide_up(map.w.rows, kLinearBlock) * blocks),
            [&](std::size_t task, int thread) {
              const std::int64_t block = static_cast<std::int64_t>(task) % blocks * kLinearRows;
              LinearArgs args = args_of(map, first + block, thread, add);
              args.x += block / ops.tile_rows * tile_bytes;
              args.rows = std::min<std::int64_t>(kLinearRows, rows - block);
              args.begin = static_cast<std::int64_t>(task) / blocks * kLinearBlock;
              args.end = std::min<std::int64_t>(args.begin + kLinearBlock, map.w.rows);
              ops.multiply(args);
            });
}

void LinearMap::multiply(std::span<const Projection> maps, const float* x, std::int64_t rows, bool add) {
  base::require(rows >= 0, "linear: rows = {}; accepted: 0 or more", rows);
  for (const Projection& map : maps) {
    check_weights(map.w, "linear");
    base::require(map.w.cols == maps[0].w.cols, "linear: maps of {} and of {} columns; accepted: the same number",
                  maps[0].w.cols, map.w.cols);
  }
  // Maps of one type share the packed rows.
  while (!maps.empty()) {
    const DType dtype = maps[0].w.dtype;
    const auto other = std::ranges::find_if(maps, [&](const Projection& map) { return map.w.dtype != dtype; });
    const std::span<const Projection> alike = maps.first(static_cast<std::size_t>(other - maps.begin()));
    const LinearOps& ops = kernels_.linear[static_cast<int>(dtype)];
    const std::int64_t cols = alike[0].w.cols;
    for (std::int64_t row = 0; row < rows; row += kPackedRows) {
      const std::int64_t count = std::min(kPackedRows, rows - row);
      pack(ops, x + row * cols, count, cols);
      if (count == 1) {
        multiply_row(ops, alike, row, add);
      } else {
        for (const Projection& map : alike) multiply_rows(ops, map, row, count, add);
      }
    }
    maps = maps.subspan(alike.size());
  }
}

}  // namespace treeattn::kernels
