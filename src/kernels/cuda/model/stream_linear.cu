// SPDX-License-Identifier: Apache-2.0
// A tile is 16 (or 32) rows of weights. The eight warps of a block share its columns: warp w has the groups of 128
// columns w, w + 8, ..., adds up what it has, and at the end of a tile the warps' sums are added in order. So the order
// of every sum follows from the shape of the matrix alone. Others add them and store the result: weights are on their
// way all the time.
//
// Tensor cores want the weights of a thread as pairs of columns 2t and 2t + 8 of 16. Which column is called which is
// free as long as x agrees: a thread's 16 bytes, columns 8t to 8t + 7 of 32, are the pairs of two products, and go to
// the tensor core as they are. int8 weights become bfloat16 on that way (stream_weights.cuh).
//
// Each warp has its weights of the next groups on their way into shared memory, where no other warp reads them: so
// there is nothing to wait for but its own copies. They run on over the ends of tiles, and the first ones are started
// before the kernel that makes x is done.
//
// Where a norm comes before the map, x is not yet divided by the size of its row: the sums are, at the end of a tile.
// And where one comes after it, the rows are left as the next such kernel wants them (stream_task.cuh).
#include <algorithm>

#include "kernels/cuda/dependent_launch.cuh"
#include "kernels/cuda/model/stream_copies.cuh"
#include "kernels/cuda/model/stream_ends.cuh"
#include "kernels/cuda/model/stream_rows.cuh"
#include "kernels/cuda/model/stream_weights.cuh"

namespace treeattn::kernels::cuda {
namespace {

// kColumns: n8 tiles of rows of x; kStages: groups on their way; kHolds: x is one row, which lies in shared memory
// and is not brought with the weights again for every tile.
template <int kTiles, int kColumns, int kStages, bool kHolds, class Weights>
__global__ void __launch_bounds__(TileEnds<kTiles, kColumns, kHolds>::kAllThreads, kTiles == 1 ? 2 : 1)
    stream_kernel(const __grid_constant__ StreamTask t) {
  using Place = GroupSlot<kTiles, Weights>;
  using Ends = TileEnds<kTiles, kColumns, kHolds>;
  constexpr int kEarly = std::min(Weights::kEarly, kStages);
  extern __shared__ __align__(16) std::byte memory[];
  __shared__ WarpSums<Ends::kEnds> sums;
  __shared__ float squares[8 * kColumns][kNormWarps];  // sums of the rows' squares, each to be added up
  const int lane = static_cast<int>(threadIdx.x) % 32, number = static_cast<int>(threadIdx.x) / 32;
  if (number >= kStreamWarps) {
    wait_for_earlier();
    return Ends::run(t, sums, squares, number - kStreamWarps, lane);
  }
  const int groups = (t.cols + kGroup - 1) / kGroup;
  const int turns = number < groups ? (groups - number + kStreamWarps - 1) / kStreamWarps : 0;
  const int slot_bytes = Place::bytes(t.rows, !kHolds);
  const std::uint32_t ring = shared_address(memory) + number * kStages * slot_bytes;
  auto* const held = reinterpret_cast<std::uint16_t*>(memory + kStreamWarps * kStages * slot_bytes);

  GroupCopies<kTiles, Weights> copies(t, number, lane, turns);
  // o comes behind attention, which waits for one load after the other: each would come behind all that o asks for.
  // Elsewhere x is there soon, and would come behind the last group.
  const bool gently = kHolds && t.add;
  const int early = kHolds && !gently ? std::min(kEarly, kStages - 1) : kEarly;
  int row_turn[kEarly];  // of x of the first groups, which is not there yet
#pragma unroll
  for (int i = 0; i < kEarly; ++i) {
    if (i >= early) continue;
    row_turn[i] = copies.any() ? copies.next_turn() : -1;
    copies.start_weights(ring + i * slot_bytes, gently);
    copies.advance();
    if constexpr (kHolds) end_copies();
  }
  // With one row the next kernel is let in when x is on its way here, and not before: what it asks for first would be
  // in the way.
  if (t.rows > 1) let_next_start();
  wait_for_earlier();
  if constexpr (kHolds) {
    HeldRow row;
    row.load(t);
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      if (i < early) continue;
      copies.start_weights(ring + i * slot_bytes);
      copies.advance();
      end_copies();
    }
    row.store(t, held, squares, number, lane);
    let_next_start();
    __syncthreads();
  } else {
#pragma unroll
    for (int i = 0; i < kEarly; ++i) {
      if (row_turn[i] >= 0) copies.start_rows(ring + i * slot_bytes, row_turn[i]);
      end_copies();  // the first of these with all weights above
    }
    if (t.rows == 1) let_next_start();
#pragma unroll
    for (int i = kEarly; i < kStages; ++i) {
      if (copies.any()) copies.start_rows(ring + i * slot_bytes, copies.next_turn());
      copies.start_weights(ring + i * slot_bytes);
      copies.advance();
      end_copies();
    }
  }

  const Weights weights;
  const std::uint32_t x_address = kHolds ? shared_address(held) : 0;
  int buffer = 0, stage = 0, tiles_before = 0;
  for (int tile = static_cast<int>(blockIdx.x); tile < t.tiles; tile += static_cast<int>(gridDim.x), buffer ^= 1) {
    float sum[kTiles][kColumns][4] = {};
    for (int turn = 0; turn < turns; ++turn) {
      const std::uint32_t slot = ring + stage * slot_bytes;
      wait_for_copies<kStages - 1>();
      __syncwarp();
#pragma unroll
      for (int s = 0; s < kGroup / kStep; ++s) {
        uint4 x[kColumns];
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
          const int row = n * 8 + lane / 4;
          x[n] = {0, 0, 0, 0};
          if constexpr (kHolds) {
            const int column = copies.column_of(turn) + s * kStep;
            if (row == 0 && column < t.cols) x[n] = load_shared(x_address + column * 2);
          } else {
            if (row < t.rows) x[n] = load_shared(slot + Place::x(row, s * 4 + lane % 4));
          }
        }
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          const auto w = weights.template load<Place>(slot, m * 8 + lane / 4, s, lane % 4);
#pragma unroll
          for (int n = 0; n < kColumns; ++n) Weights::add(sum[m][n], w, x[n]);
        }
      }
      __syncwarp();
      if (copies.any()) {
        if constexpr (!kHolds) copies.start_rows(slot, copies.next_turn());
        copies.start_weights(slot);
        copies.advance();
      }
      end_copies();
      if (++stage == kStages) stage = 0;
    }
    if (tiles_before++ >= 2) meet(kSumsTaken + buffer, Ends::kAllThreads);
#pragma unroll
    for (int i = 0; i < Ends::kEnds; ++i) {
      const float(&part)[4] = sum[i / kColumns][i % kColumns];
      sums[buffer][number][i][lane] = {part[0], part[1], part[2], part[3]};
    }
    arrive(kSumsThere + buffer, Ends::kAllThreads);
  }
}

// A kernel and what it needs.
template <int kTiles, int kColumns, int kStages, bool kHolds, class Weights>
struct Shape {
  static constexpr auto kKernel = stream_kernel<kTiles, kColumns, kStages, kHolds, Weights>;
  static constexpr int kAllThreads = TileEnds<kTiles, kColumns, kHolds>::kAllThreads;
  static constexpr int kTileRows = 16 * kTiles;
  static constexpr int kStaticBytes =
      (2 * kTiles * kColumns * 32 * 4 + 8 * kColumns) * kStreamWarps * static_cast<int>(sizeof(float));
  static bool fits(const StreamTask& task) {
    if (kHolds && (task.rows > 1 || held_bytes(task) > kMostHeldBytes)) return false;
    return kStaticBytes + dynamic_bytes(task) <= shared_memory(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  }
  // Two where they fit: what is on its way counts (docs/gpu_notes.md).
  static int blocks_of_multiprocessor(const StreamTask& task) {
    constexpr int kReserved = 1 << 10;  // of every block
    const int bytes = kReserved + kStaticBytes + dynamic_bytes(task);
    return 2 * bytes <= shared_memory(cudaDevAttrMaxSharedMemoryPerMultiprocessor) ? 2 : 1;
  }
  static int dynamic_bytes(const StreamTask& task) {
    return kStreamWarps * kStages * GroupSlot<kTiles, Weights>::bytes(task.rows, !kHolds) +
           (kHolds ? held_bytes(task) : 0);
  }
  static int held_bytes(const StreamTask& task) { return task.cols * 2; }
};

WeightRows weights_of(const StreamedMap& map) {
  return {static_cast<const std::byte*>(map.w), map.scales, static_cast<int>(map.rows)};
}

// up: not null where map 0 is gates.
template <class Chosen>
void start_shape(StreamTask& task, std::span<const StreamedMap> maps, const StreamedMap* up, const Queue& queue) {
  const std::int64_t tile_rows = up != nullptr ? Chosen::kTileRows / 2 : Chosen::kTileRows;
  for (std::size_t i = 0; i < kStreamedMaps; ++i) {
    task.first_tile[i] = task.tiles;
    if (i >= maps.size()) continue;
    task.maps[i] = maps[i];
    if (task.maps[i].pitch == 0) task.maps[i].pitch = maps[i].rows;
    task.weights[i] = weights_of(maps[i]);
    task.tiles += static_cast<int>((maps[i].rows + tile_rows - 1) / tile_rows);
  }
  task.first_tile[kStreamedMaps] = task.tiles;
  if (up != nullptr) task.weights[1] = weights_of(*up);
  // As much as the GPU gives, and not what this call needs: another thread may be about to start the same kernel.
  check(
      cudaFuncSetAttribute(reinterpret_cast<const void*>(Chosen::kKernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                           shared_memory(cudaDevAttrMaxSharedMemoryPerBlockOptin) - Chosen::kStaticBytes),
      "shared memory of the kernel");
  const int blocks = std::min(task.tiles, Chosen::blocks_of_multiprocessor(task) * queue.multiprocessors);
  start_dependent_with(Chosen::kKernel, static_cast<unsigned>(blocks), Chosen::kAllThreads,
                       static_cast<std::size_t>(Chosen::dynamic_bytes(task)), queue.overlaps, queue.stream,
                       "linear map", task);
}

constexpr int kManyTiles = 2;  // with several rows: x is brought again for every tile

// The first of these that this GPU has the shared memory for; the bits are the same.
template <class First, class... Others>
void start_first(StreamTask& task, std::span<const StreamedMap> maps, const StreamedMap* up, const Queue& queue) {
  if constexpr (sizeof...(Others) > 0) {
    if (!First::fits(task)) return start_first<Others...>(task, maps, up, queue);
  }
  start_shape<First>(task, maps, up, queue);
}

template <class W>
void start_with(StreamTask& task, std::span<const StreamedMap> maps, const StreamedMap* up, const Queue& queue) {
  if (task.rows == 1) {
    start_first<Shape<1, 1, 3, true, W>, Shape<1, 1, 3, false, W>, Shape<1, 1, 1, false, W>>(task, maps, up, queue);
  } else if (task.rows <= 8) {
    start_first<Shape<kManyTiles, 1, 2, false, W>, Shape<1, 1, 3, false, W>, Shape<1, 1, 1, false, W>>(task, maps, up,
                                                                                                       queue);
  } else {
    start_first<Shape<kManyTiles, 2, 2, false, W>, Shape<1, 2, 1, false, W>>(task, maps, up, queue);
  }
}

void start(StreamTask task, std::span<const StreamedMap> maps, const StreamedMap* up, const Queue& queue) {
  const bool int8 = maps.front().scales != nullptr;
  int8 ? start_with<Int8Weights>(task, maps, up, queue) : start_with<BFloat16Weights>(task, maps, up, queue);
}

// Of the rows of x from `first` on.
StreamTask task_of(StreamedRows x, std::int64_t first, std::int64_t rows, std::int64_t cols) {
  x.rounded += first * cols;
  if (x.squares != nullptr) {
    x.squares += first * (cols / kNormPart);
    x.unrounded += first * cols;
  }
  StreamTask task;
  task.x = x;
  task.cols = static_cast<int>(cols);
  task.rows = static_cast<int>(std::min(kStreamedRows, rows - first));
  return task;
}

// The same for a map of them.
StreamedMap from_row(StreamedMap map, std::int64_t first) {
  map.y += first * (map.pitch == 0 ? map.rows : map.pitch);
  return map;
}

}  // namespace

bool takes_step(const StepTarget& target, std::int64_t rows) {
  return target.k.dim / 2 % (8 * (rows == 1 ? 1 : kManyTiles)) == 0;  // a tile has pairs of one head
}

bool can_stream(const WeightMatrix& w) {
  return (w.dtype == DType::kBFloat16 || w.dtype == DType::kInt8) && w.cols % 8 == 0 &&
         reinterpret_cast<std::uintptr_t>(w.data) % 16 == 0 && w.cols < (1 << 30) && w.rows < (1 << 30);
}

void stream_linear(std::span<const StreamedMap> maps, std::int64_t cols, const StreamedRows& x, std::int64_t rows,
                   const Queue& queue) {
  std::int64_t outputs = 0;
  for (const StreamedMap& map : maps) outputs += map.rows;
  for (std::int64_t first = 0; outputs > 0 && first < rows; first += kStreamedRows) {
    StreamedMap shifted[kStreamedMaps];
    for (std::size_t i = 0; i < maps.size(); ++i) shifted[i] = from_row(maps[i], first);
    start(task_of(x, first, rows, cols), std::span(shifted, maps.size()), nullptr, queue);
  }
}

void stream_added(const StreamedMap& map, std::int64_t cols, const StreamedRows& x, std::int64_t rows,
                  const NextNorm& next, const Queue& queue) {
  for (std::int64_t first = 0; map.rows > 0 && first < rows; first += kStreamedRows) {
    const StreamedMap shifted = from_row(map, first);
    StreamTask task = task_of(x, first, rows, cols);
    task.add = true;
    task.next = next;
    if (next.weight != nullptr) {
      task.next.scaled += first * map.rows;
      task.next.squares += first * (map.rows / kNormPart);
    }
    start(task, {&shifted, 1}, nullptr, queue);
  }
}

void stream_step(std::span<const StreamedMap> qkv, std::int64_t cols, const StreamedRows& x, std::int64_t rows,
                 const StepTarget& target, const Queue& queue) {
  for (std::int64_t first = 0; first < rows; first += kStreamedRows) {
    StreamTask task = task_of(x, first, rows, cols);
    task.step = target;
    task.half = target.k.dim / 2;
    task.first_row = static_cast<int>(first);
    start(task, qkv, nullptr, queue);
  }
}

void stream_gated(const StreamedMap& gate, const StreamedMap& up, std::int64_t cols, const StreamedRows& x,
                  std::int64_t rows, std::uint16_t* y, const Queue& queue) {
  for (std::int64_t first = 0; gate.rows > 0 && first < rows; first += kStreamedRows) {
    StreamTask task = task_of(x, first, rows, cols);
    task.activated = y + first * gate.rows;
    start(task, {&gate, 1}, &up, queue);
  }
}

}  // namespace treeattn::kernels::cuda
