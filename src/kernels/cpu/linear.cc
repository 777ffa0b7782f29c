// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/linear.h"

#include <algorithm>

#include "base/check.h"

namespace treeattn::kernels {
namespace {

constexpr std::int64_t kPackedRows = 2 * kLinearRows;  // of x, packed at once
constexpr std::int64_t kPackAlone = 1 << 15;           // elements of x; fewer are packed faster than a thread starts
constexpr std::int64_t kTaskBytes = 128 << 10;         // least weights worth a task
constexpr std::int64_t kTasksPerThread = 8;            // so that a thread held up does not hold up the rest

std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Rows of weights of one task. A single row of x reads long streams; more rows share a block of packed weights.
std::int64_t rows_of_task(const WeightMatrix& w, std::int64_t rows, int threads) {
  if (rows > 1) return kLinearBlock;
  const std::int64_t row_bytes = w.cols * static_cast<std::int64_t>(dtype_size(w.dtype));
  const std::int64_t tasks = std::min(kTasksPerThread * threads, divide_up(w.rows * row_bytes, kTaskBytes));
  return divide_up(w.rows, std::max<std::int64_t>(tasks, 1));
}

}  // namespace

LinearMap::LinearMap(const ModelKernels& kernels, ThreadPool& pool)
    : kernels_(kernels), pool_(pool), scratch_(kLinearScratchBytes * static_cast<std::size_t>(pool.size())) {}

void LinearMap::pack(const LinearOps& ops, const float* x, std::int64_t rows, std::int64_t cols) {
  const auto bytes = static_cast<std::int64_t>(ops.tile_bytes(cols));
  const std::int64_t tiles = divide_up(rows, ops.tile_rows);
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

void LinearMap::multiply(const WeightMatrix& w, const float* x, std::int64_t rows, float* y, bool add) {
  check_weights(w, "linear");
  base::require(rows >= 0, "linear: rows = {}; accepted: 0 or more", rows);
  const LinearOps& ops = kernels_.linear[static_cast<int>(w.dtype)];
  for (std::int64_t row = 0; row < rows; row += kPackedRows) {
    const std::int64_t count = std::min(kPackedRows, rows - row);
    pack(ops, x + row * w.cols, count, w.cols);
    const std::int64_t blocks = divide_up(count, kLinearRows), step = rows_of_task(w, count, pool_.size());
    const auto tile_bytes = static_cast<std::int64_t>(ops.tile_bytes(w.cols));
    // Tasks that share weights are neighbours, so that what one thread has read another finds in the shared cache.
    pool_.run(static_cast<std::size_t>(divide_up(w.rows, step) * blocks), [&](std::size_t task, int thread) {
      const std::int64_t block = static_cast<std::int64_t>(task) % blocks * kLinearRows;
      LinearArgs args;
      args.x = packed_.as<std::byte>() + block / ops.tile_rows * tile_bytes;
      args.rows = std::min<std::int64_t>(kLinearRows, count - block);
      args.cols = w.cols;
      args.w = static_cast<const std::byte*>(w.data);
      args.scales = w.scales;
      args.begin = static_cast<std::int64_t>(task) / blocks * step;
      args.end = std::min(args.begin + step, w.rows);
      args.y = y + (row + block) * w.rows;
      args.y_stride = w.rows;
      args.add = add;
      args.scratch = scratch_.as<std::byte>() + static_cast<std::size_t>(thread) * kLinearScratchBytes;
      ops.multiply(args);
    });
  }
}

}  // namespace treeattn::kernels
