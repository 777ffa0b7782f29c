// SPDX-License-Identifier: Apache-2.0
// A tile is 16 (or 32) rows of weights. The eight warps of a block share its columns: warp w has the groups of 128
// columns w, w + 8, ..., adds up what it has, and at the end of a tile the warps' sums are added in order. So the order
// of every sum follows from the shape of the matrix alone.
//
// Tensor cores want the weights of a thread as pairs of columns 2t and 2t + 8 of 16. Which column is called which is
// free as long as x agrees: a thread's 16 bytes, columns 8t to 8t + 7 of 32, are the pairs of two products, and go to
// the tensor core as they are.
//
// Each thread has its weights of the next groups on their way into shared memory, where nobody else reads them: so
// there is nothing to wait for but its own copies. They run on over the ends of tiles, and the first ones are started
// before the kernel that makes x is done.
#include <algorithm>

#include "base/half.h"
#include "kernels/cuda/dependent_launch.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/model/linear_kernels.h"
#include "kernels/cuda/model/norm.cuh"
#include "kernels/cuda/model/swiglu.cuh"

namespace treeattn::kernels::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kGroup = 128;  // columns a warp takes at a time
constexpr int kStep = 32;    // columns of one load of a thread's row: two products

struct StreamTask {
  StreamedMap maps[kStreamedMaps];
  int first_tile[kStreamedMaps + 1] = {};  // of each map, then of none
  const std::uint16_t* up = nullptr;       // not null: gated, and map 0 is the gates
  std::uint16_t* activated = nullptr;      // where that goes
  StreamedRows x;
  int tiles = 0;
  int cols = 0;
  int rows = 0;  // of x
  bool add = false;
};

__device__ int map_of(const StreamTask& t, int tile) {
  int map = 0;
  while (map + 1 < kStreamedMaps && tile >= t.first_tile[map + 1]) ++map;
  return map;
}

// ---- x in float32

constexpr int kMostVectors = 4;  // of four columns, that a thread has of a row
constexpr int kMostCols = kMostVectors * 4 * kThreads;
constexpr int kMostFloatBytes = 36 << 10;  // of shared memory, once they are rounded

// Rows in shared memory lie so far apart, in elements, that two of them begin in different banks.
__host__ __device__ inline int row_pitch(int cols) { return cols + kStep; }

// A norm's weights of this thread; they are read before x is there.
struct NormPart {
  float4 weight[kMostVectors];

  __device__ explicit NormPart(const StreamTask& t) {
#pragma unroll
    for (int j = 0; j < kMostVectors; ++j) {
      const int i = 4 * (static_cast<int>(threadIdx.x) + j * kThreads);
      weight[j] = t.x.norm != nullptr && i < t.cols ? *reinterpret_cast<const float4*>(t.x.norm + i) : float4{};
    }
  }
};

// Normalises and rounds the rows of x into shared memory; the sums and products of norm.cuh and norm_kernel. Called by
// all threads of the block.
__device__ void round_rows(const StreamTask& t, const NormPart& norm, std::uint16_t* to, float* scratch) {
  static_assert(kThreads == kNormThreads);
  for (int row = 0; row < t.rows; ++row, to += row_pitch(t.cols)) {
    const float* from = t.x.floats + static_cast<std::int64_t>(row) * t.cols;
    float4 x[kMostVectors];
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < kMostVectors; ++j) {
      const int i = 4 * (static_cast<int>(threadIdx.x) + j * kThreads);
      x[j] = i < t.cols ? *reinterpret_cast<const float4*>(from + i) : float4{};
    }
    if (t.x.norm != nullptr) {
#pragma unroll
      for (int j = 0; j < kMostVectors; ++j) squares = add_squares(x[j], squares);
      const float by = inverse_size(squares, t.cols, t.x.eps, scratch);
#pragma unroll
      for (int j = 0; j < kMostVectors; ++j) {
        const float4 weight = norm.weight[j];
        x[j] = {x[j].x * by * weight.x, x[j].y * by * weight.y, x[j].z * by * weight.z, x[j].w * by * weight.w};
      }
    }
#pragma unroll
    for (int j = 0; j < kMostVectors; ++j) {
      const int i = 4 * (static_cast<int>(threadIdx.x) + j * kThreads);
      if (i >= t.cols) continue;
      *reinterpret_cast<uint2*>(to + i) = {pack<__nv_bfloat16>(x[j].x, x[j].y), pack<__nv_bfloat16>(x[j].z, x[j].w)};
    }
  }
  __syncthreads();
}

// ---- what is on its way

// Of the groups of a warp: weights of kTiles tiles, and x where it is not in shared memory anyway.
template <int kTiles>
struct Slot {
  static constexpr int kWeights = kTiles * 2 * (kGroup / kStep) * 512;  // bytes; a unit of 16 for each lane
  static constexpr int kRow = kGroup * 2;                               // of a row of x
  __host__ __device__ static int bytes(int rows, bool rounds) { return kWeights + (rounds ? 0 : rows * kRow); }
};

// The copies of one warp, in the order in which it works on them.
template <int kTiles>
class Copies {
 public:
  __device__ Copies(const StreamTask& task, int warp, int lane_number, int turn_count)
      : t(task), number(warp), lane(lane_number), turns(turn_count), tile(static_cast<int>(blockIdx.x)) {
    find_rows();
  }

  __device__ int column_of(int of_turn) const { return (number + of_turn * kWarps) * kGroup + lane % 4 * 8; }

  // The weights of the next group into a slot; nothing after the last.
  __device__ void start_weights(std::uint32_t slot) {
    if (tile < t.tiles && turns > 0) {
      const int first = column_of(turn);
#pragma unroll
      for (int s = 0; s < kGroup / kStep; ++s) {
        const int column = first + s * kStep;
        const bool there = column < t.cols;
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          const std::uint32_t to = slot + ((s * kTiles + m) * 2 * 32 + lane) * 16;
          copy_async_16(to, low[m] + (there ? column : 0), there && has_low[m]);
          copy_async_16(to + 512, high[m] + (there ? column : 0), there && has_high[m]);
        }
      }
    }
  }
  // x of the group `of_turn`, behind its weights.
  __device__ void start_rows(std::uint32_t slot, int of_turn) const {
    const int first = column_of(of_turn);
    for (int row = lane / 4; row < t.rows; row += 8) {
      const std::uint16_t* from = t.x.rounded + static_cast<std::int64_t>(row) * t.cols;
#pragma unroll
      for (int s = 0; s < kGroup / kStep; ++s) {
        const int column = first + s * kStep;
        const bool there = column < t.cols;
        copy_async_16(slot + Slot<kTiles>::kWeights + row * Slot<kTiles>::kRow + (s * 4 + lane % 4) * 16,
                      from + (there ? column : 0), there);
      }
    }
  }
  __device__ bool any() const { return tile < t.tiles && turns > 0; }
  __device__ int next_turn() const { return turn; }
  __device__ void advance() {
    if (++turn < turns) return;
    turn = 0;
    tile += static_cast<int>(gridDim.x);
    find_rows();
  }

 private:
  __device__ void find_rows() {
    const bool gated = t.up != nullptr;
    const int map = tile < t.tiles ? map_of(t, tile) : 0;
    const int rows = tile < t.tiles ? static_cast<int>(t.maps[map].rows) : 0;
    const std::uint16_t* const w = t.maps[map].w;
    const int base = (tile - t.first_tile[map]) * (gated ? 8 : 16) * kTiles + lane / 4;
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      const int low_row = base + m * (gated ? 8 : 16), high_row = gated ? low_row : low_row + 8;
      has_low[m] = low_row < rows;
      has_high[m] = high_row < rows;
      low[m] = w + static_cast<std::int64_t>(has_low[m] ? low_row : 0) * t.cols;
      high[m] = (gated ? t.up : w) + static_cast<std::int64_t>(has_high[m] ? high_row : 0) * t.cols;
    }
  }

  const StreamTask& t;
  const int number, lane, turns;
  int tile, turn = 0;
  const std::uint16_t* low[kTiles];
  const std::uint16_t* high[kTiles];
  bool has_low[kTiles], has_high[kTiles];
};

__device__ inline uint4 load_shared(std::uint32_t address) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

__device__ inline void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all but the last kLeft of them are there.
template <int kLeft>
__device__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// The sums of a tile, of one thread of each warp: rows g and g + 8 of tile m, rows 2t and 2t + 1 of x from 8n on.
template <int kTiles>
__device__ void store_sums(const StreamTask& t, int tile, int m, int n, int lane, const float (&sum)[4]) {
  const int map = map_of(t, tile);
  const StreamedMap& to = t.maps[map];
  const bool gated = t.up != nullptr;
  const int row = ((tile - t.first_tile[map]) * kTiles + m) * (gated ? 8 : 16) + lane / 4;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int x_row = n * 8 + lane % 4 * 2 + j;
    if (x_row >= t.rows) continue;
    if (gated) {
      if (row >= to.rows) continue;
      t.activated[x_row * to.rows + row] = base::float_to_bfloat16(swiglu(sum[j], sum[2 + j]));
      continue;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + 8 * half >= to.rows) continue;
      float* y = to.y + x_row * to.rows + row + 8 * half;
      *y = t.add ? *y + sum[2 * half + j] : sum[2 * half + j];
    }
  }
}

// kColumns: n8 tiles of rows of x; kStages: groups on their way; kRounds: x is in float32, and lies in shared memory
// once it is rounded.
template <int kTiles, int kColumns, int kStages, bool kRounds>
__global__ void __launch_bounds__(kThreads) stream_kernel(const __grid_constant__ StreamTask t) {
  extern __shared__ __align__(16) std::byte memory[];
  __shared__ float4 sums[2][kWarps][kTiles * kColumns][32];
  const int lane = static_cast<int>(threadIdx.x) % 32, number = static_cast<int>(threadIdx.x) / 32;
  const int groups = (t.cols + kGroup - 1) / kGroup;
  const int turns = number < groups ? (groups - number + kWarps - 1) / kWarps : 0;
  const int slot_bytes = Slot<kTiles>::bytes(t.rows, kRounds);
  const std::uint32_t ring = shared_address(memory) + number * kStages * slot_bytes;
  auto* const rounded = reinterpret_cast<std::uint16_t*>(memory + kWarps * kStages * slot_bytes);

  Copies<kTiles> copies(t, number, lane, turns);
  int row_turn[kStages];  // of x of the first groups, which is not there yet
#pragma unroll
  for (int i = 0; i < kStages; ++i) {
    row_turn[i] = copies.any() ? copies.next_turn() : -1;
    copies.start_weights(ring + i * slot_bytes);
    copies.advance();
    if constexpr (kRounds) end_copies();
  }
  if constexpr (kRounds) {
    const NormPart norm(t);
    let_next_start();
    wait_for_earlier();
    round_rows(t, norm, rounded, reinterpret_cast<float*>(sums));
  } else {
    let_next_start();
    wait_for_earlier();
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      if (row_turn[i] >= 0) copies.start_rows(ring + i * slot_bytes, row_turn[i]);
      end_copies();  // the first of these with all weights above
    }
  }

  const std::uint32_t x_address = kRounds ? shared_address(rounded) : 0;
  int buffer = 0, stage = 0;
  for (int tile = static_cast<int>(blockIdx.x); tile < t.tiles; tile += static_cast<int>(gridDim.x), buffer ^= 1) {
    float sum[kTiles][kColumns][4] = {};
    for (int turn = 0; turn < turns; ++turn) {
      const std::uint32_t slot = ring + stage * slot_bytes;
      wait_for_copies<kStages - 1>();
#pragma unroll
      for (int s = 0; s < kGroup / kStep; ++s) {
        uint4 x[kColumns];
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
          const int row = n * 8 + lane / 4;
          x[n] = {0, 0, 0, 0};
          if constexpr (kRounds) {
            const int column = copies.column_of(turn) + s * kStep;
            if (row < t.rows && column < t.cols) x[n] = load_shared(x_address + (row * row_pitch(t.cols) + column) * 2);
          } else {
            if (row < t.rows) {
              x[n] = load_shared(slot + Slot<kTiles>::kWeights + row * Slot<kTiles>::kRow + (s * 4 + lane % 4) * 16);
            }
          }
        }
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          const std::uint32_t at = slot + ((s * kTiles + m) * 2 * 32 + lane) * 16;
          const uint4 low = load_shared(at), high = load_shared(at + 512);
          const std::uint32_t first[4] = {low.x, high.x, low.y, high.y};
          const std::uint32_t second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
          for (int n = 0; n < kColumns; ++n) {
            multiply_add<__nv_bfloat16>(sum[m][n], first, x[n].x, x[n].y);
            multiply_add<__nv_bfloat16>(sum[m][n], second, x[n].z, x[n].w);
          }
        }
      }
      if (copies.any()) {
        if constexpr (!kRounds) copies.start_rows(slot, copies.next_turn());
        copies.start_weights(slot);
        copies.advance();
      }
      end_copies();
      if (++stage == kStages) stage = 0;
    }
#pragma unroll
    for (int i = 0; i < kTiles * kColumns; ++i) {
      const float(&part)[4] = sum[i / kColumns][i % kColumns];
      sums[buffer][number][i][lane] = {part[0], part[1], part[2], part[3]};
    }
    __syncthreads();  // one a tile: who is ahead writes to the other buffer
    if (number < kTiles * kColumns) {
      float all[4] = {};
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float4 part = sums[buffer][w][number][lane];
        all[0] += part.x;
        all[1] += part.y;
        all[2] += part.z;
        all[3] += part.w;
      }
      store_sums<kTiles>(t, tile, number / kColumns, number % kColumns, lane, all);
    }
  }
}

// Of a block (cudaDevAttrMaxSharedMemoryPerBlockOptin) or of a multiprocessor.
int shared_memory(cudaDeviceAttr of) {
  int gpu = 0, most = 0;
  check(cudaGetDevice(&gpu), "current GPU");
  check(cudaDeviceGetAttribute(&most, of, gpu), "shared memory of the GPU");
  return most;
}

// A kernel and what it needs.
template <int kTiles, int kColumns, int kStages, bool kRounds>
struct Shape {
  static constexpr auto kKernel = stream_kernel<kTiles, kColumns, kStages, kRounds>;
  static constexpr int kTileRows = 16 * kTiles;
  static constexpr int kStaticBytes = 2 * kWarps * kTiles * kColumns * 32 * static_cast<int>(sizeof(float4));
  static bool fits(const StreamTask& task) {
    return kStaticBytes + dynamic_bytes(task) <= shared_memory(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  }
  // Two where they fit: what is on its way counts (docs/gpu_notes.md).
  static int blocks_of_multiprocessor(const StreamTask& task) {
    constexpr int kReserved = 1 << 10;  // of every block
    const int bytes = kReserved + kStaticBytes + dynamic_bytes(task);
    return 2 * bytes <= shared_memory(cudaDevAttrMaxSharedMemoryPerMultiprocessor) ? 2 : 1;
  }
  static int dynamic_bytes(const StreamTask& task) {
    const int row_bytes = kRounds ? row_pitch(task.cols) * 2 * task.rows : 0;
    return kWarps * kStages * Slot<kTiles>::bytes(task.rows, kRounds) + row_bytes;
  }
};

template <class Chosen>
void start_shape(StreamTask& task, std::span<const StreamedMap> maps, const Queue& queue) {
  const std::int64_t tile_rows = task.up != nullptr ? Chosen::kTileRows / 2 : Chosen::kTileRows;
  for (std::size_t i = 0; i < kStreamedMaps; ++i) {
    task.first_tile[i] = task.tiles;
    if (i >= maps.size()) continue;
    task.maps[i] = maps[i];
    task.tiles += static_cast<int>((maps[i].rows + tile_rows - 1) / tile_rows);
  }
  task.first_tile[kStreamedMaps] = task.tiles;
  // As much as the GPU gives, and not what this call needs: another thread may be about to start the same kernel.
  check(
      cudaFuncSetAttribute(reinterpret_cast<const void*>(Chosen::kKernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                           shared_memory(cudaDevAttrMaxSharedMemoryPerBlockOptin) - Chosen::kStaticBytes),
      "shared memory of the kernel");
  const int blocks = std::min(task.tiles, Chosen::blocks_of_multiprocessor(task) * queue.multiprocessors);
  start_dependent_with(Chosen::kKernel, static_cast<unsigned>(blocks), kThreads,
                       static_cast<std::size_t>(Chosen::dynamic_bytes(task)), queue.overlaps, queue.stream,
                       "linear map", task);
}

template <class First, class Second>
void start_first(StreamTask& task, std::span<const StreamedMap> maps, const Queue& queue) {
  if (First::fits(task)) {
    start_shape<First>(task, maps, queue);
  } else {
    start_shape<Second>(task, maps, queue);
  }
}

void start(StreamTask task, std::span<const StreamedMap> maps, const Queue& queue) {
  // The first that this GPU has the shared memory for; the bits are the same.
  if (task.x.floats != nullptr) {
    start_first<Shape<1, 1, 3, true>, Shape<1, 1, 1, true>>(task, maps, queue);
  } else if (task.rows <= 8) {
    start_first<Shape<1, 1, 3, false>, Shape<1, 1, 1, false>>(task, maps, queue);
  } else {
    start_first<Shape<2, 2, 2, false>, Shape<1, 2, 1, false>>(task, maps, queue);
  }
}

StreamedRows after(StreamedRows x, std::int64_t rows, std::int64_t cols) {
  if (x.rounded != nullptr) x.rounded += rows * cols;
  if (x.floats != nullptr) x.floats += rows * cols;
  return x;
}

}  // namespace

bool takes_floats(std::int64_t rows, std::int64_t cols) {
  return rows <= 8 && cols <= kMostCols && rows * row_pitch(static_cast<int>(cols)) * 2 <= kMostFloatBytes;
}

bool can_stream(const WeightMatrix& w) {
  return w.dtype == DType::kBFloat16 && w.cols % 8 == 0 && reinterpret_cast<std::uintptr_t>(w.data) % 16 == 0 &&
         w.cols < (1 << 30) && w.rows < (1 << 30);
}

void stream_linear(std::span<const StreamedMap> maps, std::int64_t cols, const StreamedRows& x, std::int64_t rows,
                   bool add, const Queue& queue) {
  std::int64_t outputs = 0;
  for (const StreamedMap& map : maps) outputs += map.rows;
  for (std::int64_t first = 0; outputs > 0 && first < rows; first += kStreamedRows) {
    StreamedMap shifted[kStreamedMaps];
    for (std::size_t i = 0; i < maps.size(); ++i) {
      shifted[i] = maps[i];
      shifted[i].y += first * maps[i].rows;
    }
    StreamTask task;
    task.x = after(x, first, cols);
    task.cols = static_cast<int>(cols);
    task.rows = static_cast<int>(std::min(kStreamedRows, rows - first));
    task.add = add;
    start(task, std::span(shifted, maps.size()), queue);
  }
}

void stream_gated(const std::uint16_t* gate, const std::uint16_t* up, std::int64_t gate_rows, std::int64_t cols,
                  const StreamedRows& x, std::int64_t rows, std::uint16_t* y, const Queue& queue) {
  for (std::int64_t first = 0; gate_rows > 0 && first < rows; first += kStreamedRows) {
    StreamTask task;
    task.up = up;
    task.activated = y + first * gate_rows;
    task.x = after(x, first, cols);
    task.cols = static_cast<int>(cols);
    task.rows = static_cast<int>(std::min(kStreamedRows, rows - first));
    const StreamedMap gates{gate, nullptr, gate_rows};
    start(task, {&gates, 1}, queue);
  }
}

}  // namespace treeattn::kernels::cuda
