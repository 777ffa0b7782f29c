// SPDX-License-Identifier: Apache-2.0
#include <cuda_pipeline.h>

#include <algorithm>

#include "base/half.h"
#include "kernels/cuda/dependent_launch.cuh"
#include "kernels/cuda/ranks/peer_kernel.h"
#include "kernels/cuda/ranks/warp_rows.cuh"

namespace treeattn::kernels::cuda {
namespace {

constexpr int kWarps = kPeerRowsAtOnce;
constexpr int kThreads = kWarps * kLanes;
static_assert(kThreads >= kMostPeers);
constexpr int kMostOfLane = 9;  // floats of a row: heads have up to 256 columns
static_assert(kMostOfLane * kLanes >= 256 + 2);
constexpr std::size_t kSharedBytes = std::size_t{47} << 10;  // a block has 48 KiB without asking for more

__device__ std::uint64_t now() {
  std::uint64_t time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

__device__ void raise_flag(unsigned* flag, unsigned value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

__device__ unsigned look_at(const unsigned* flag) {
  unsigned value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

// Which call this is, and where in a mailbox its states lie.
struct Turn {
  unsigned number;
  std::int64_t box;
};
__device__ Turn this_turn(const PeerParams& p) {
  const unsigned number = p.turns == nullptr ? p.turn : p.turns[blockIdx.x] + 1;
  return {number, number % 2 * p.odd_turns};
}

// A row of this rank's states into all mailboxes, at the same place. All loads are on their way before the first store.
__device__ void push_row(const PeerParams& p, const float* from, std::int64_t place) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  float value[kMostOfLane];
#pragma unroll
  for (int i = 0; i < kMostOfLane; ++i) {
    if (lane + i * kLanes < p.row_floats) value[i] = from[lane + i * kLanes];
  }
  for (int peer = 0; peer < p.ranks; ++peer) {
    float* to = p.mailbox[(p.rank + peer) % p.ranks] + place + lane;  // not all to the same one first
#pragma unroll
    for (int i = 0; i < kMostOfLane; ++i) {
      if (lane + i * kLanes < p.row_floats) to[i * kLanes] = value[i];
    }
  }
}

// Merges follow one another, and each would wait for what the last one wrote: so a row of all states is copied to
// shared memory first, where there is room for it.
__host__ __device__ std::size_t shared_bytes(const PeerParams& p) {
  return kWarps * static_cast<std::size_t>(p.all_blocks) * static_cast<std::size_t>(p.row_floats) * sizeof(float);
}
__host__ __device__ bool fits(const PeerParams& p) { return shared_bytes(p) <= kSharedBytes; }

__device__ float* copy_to_shared(const PeerParams& p, const float* from, std::int64_t stride, float* to) {
  for (int block = 0; block < p.all_blocks; ++block) {
    for (int i = static_cast<int>(threadIdx.x) % kLanes; i < p.row_floats; i += kLanes) {
      __pipeline_memcpy_async(to + block * p.row_floats + i, from + block * stride + i, sizeof(float));
    }
  }
  __pipeline_commit();
  __pipeline_wait_prior(0);
  __syncwarp();
  return to;
}

// Says that this block's rows have been pushed, and waits for those of the other ranks. False where some did not come.
__device__ bool meet_others(const PeerParams& p, unsigned turn) {
  __threadfence_system();
  __syncthreads();
  const int mine = static_cast<int>(threadIdx.x);
  bool alone = false;
  if (mine < p.ranks) {
    if (p.push) raise_flag(p.flags[mine] + p.rank * kPeerBlocks + blockIdx.x, turn);
    const unsigned* flag = p.flags[p.rank] + mine * kPeerBlocks + blockIdx.x;
    const std::uint64_t end = now() + p.nanoseconds;
    // A rank may be ahead of this one, so its count may be higher. Signed, because counts go round.
    while (p.merge && static_cast<int>(look_at(flag) - turn) < 0) {
      if (now() < end) continue;
      p.missing[mine] = 1;
      raise_flag(p.turns + kPeerBlocks, 1);
      alone = true;
      break;
    }
  }
  if (__syncthreads_or(alone)) return false;
  __threadfence_system();
  return true;
}

// The merges of the plan, one after the other, of one row of all states in the hands of a warp. Which they are is read
// for many at once: one that is read when it is needed takes longer than the merge.
__device__ void merge_in_order(const PeerParams& p, int2 first_ones, float* states, std::int64_t stride) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const auto* const merges = reinterpret_cast<const int2*>(p.merges);
  for (int first = 0; first < p.merge_count; first += kLanes) {
    const int count = min(kLanes, p.merge_count - first);
    const int2 pair = first == 0 ? first_ones : lane < count ? merges[first + lane] : int2{};
    for (int i = 0; i < count; ++i) {
      const int lower = __shfl_sync(~0u, pair.x, i), higher = __shfl_sync(~0u, pair.y, i);
      warp_merge_row(states + lower * stride, states + higher * stride, p.row_floats);
    }
  }
}

// Wherever it is wanted, by one warp.
__device__ void store_root(const PeerParams& p, std::int64_t row, const float* root) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  for (int i = lane; i < p.row_floats; i += kLanes) {
    if (p.result != nullptr) p.result[row * p.row_floats + i] = root[i];
    if (p.kept != nullptr) p.kept[row * p.row_floats + i] = root[i];
  }
  if (p.out.values == nullptr) return;
  const int columns = p.row_floats - 2;
  for (int i = lane; i < columns; i += kLanes) {
    const float value = merge::finished(root[0], root[1], root[2 + i]);
    p.out.values[row * columns + i] = value;
    if (p.out.rounded != nullptr) p.out.rounded[row * columns + i] = base::float_to_bfloat16(value);
  }
}

// Block b takes every gridDim-th row of all states, from its own rank's to the merged ones, and its flags say that
// these rows have come. So it waits for block b of the other ranks alone, and no block of a rank for another of the
// same.
__global__ void __launch_bounds__(kThreads) exchange_kernel(const __grid_constant__ PeerParams p) {
  let_next_start();
  wait_for_earlier();
  // All threads of a block alike, though another block may be about to raise it.
  if (__syncthreads_or(p.turns != nullptr && look_at(p.turns + kPeerBlocks) != 0)) return;
  const Turn turn = this_turn(p);
  const int lane = static_cast<int>(threadIdx.x) % kLanes, warp = static_cast<int>(threadIdx.x) / kLanes;
  const std::int64_t first = blockIdx.x + std::int64_t{gridDim.x} * warp, step = std::int64_t{gridDim.x} * kWarps;
  const std::int64_t block_floats = p.rows * p.row_floats;
  for (int block = 0; p.push && block < p.blocks; ++block) {
    for (std::int64_t row = first; row < p.rows; row += step) {
      push_row(p, p.own + block * block_floats + row * p.row_floats,
               turn.box + (p.first_block + block) * block_floats + row * p.row_floats);
    }
  }
  if (p.ranks > 0 && !meet_others(p, turn.number)) return;
  if (!p.merge) return;
  extern __shared__ float shared[];
  const int2 first_ones = lane < p.merge_count ? reinterpret_cast<const int2*>(p.merges)[lane] : int2{};
  for (std::int64_t row = first; row < p.rows; row += step) {
    float* states = p.mailbox[p.rank] + turn.box + row * p.row_floats;
    std::int64_t stride = block_floats;
    if (fits(p)) {
      states = copy_to_shared(p, states, stride, shared + warp * p.all_blocks * p.row_floats);
      stride = p.row_floats;
    }
    merge_in_order(p, first_ones, states, stride);
    store_root(p, row, states + p.root * stride);
    __syncwarp();
  }
  if (p.turns != nullptr && threadIdx.x == 0) p.turns[blockIdx.x] = turn.number;
  if (p.finished == nullptr) return;
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) raise_flag(p.finished + blockIdx.x, turn.number);
}

}  // namespace

void start_exchange(const PeerParams& params, bool overlaps, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(exchange_blocks(params));
  const std::size_t bytes = params.merge && fits(params) ? shared_bytes(params) : 0;
  start_dependent_with(exchange_kernel, blocks, kThreads, bytes, overlaps, stream, "exchange between GPUs", params);
}

void load_exchange() {
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, exchange_kernel), "loading of the exchange");
}

}  // namespace treeattn::kernels::cuda
