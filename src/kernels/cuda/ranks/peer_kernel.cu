// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/launch.h"
#include "kernels/cuda/ranks/peer_kernel.h"
#include "kernels/cuda/ranks/warp_rows.cuh"

namespace treeattn::kernels::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kLanes;
static_assert(kThreads >= kMostPeers);

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

// Block b takes every gridDim-th row of all states, from its own rank's to the merged ones, and its flags say that
// these rows have come. So it waits for block b of the other ranks alone, and no block of a rank for another of the
// same.
__global__ void __launch_bounds__(kThreads) exchange_kernel(const __grid_constant__ PeerParams p) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes, warp = static_cast<int>(threadIdx.x) / kLanes;
  const std::int64_t first = blockIdx.x + std::int64_t{gridDim.x} * warp, step = std::int64_t{gridDim.x} * kWarps;
  const std::int64_t block_floats = p.rows * p.row_floats;
  for (int peer = 0; p.push && peer < p.ranks; ++peer) {
    const int to = (p.rank + peer) % p.ranks;  // not all to the same one first
    for (int block = 0; block < p.blocks; ++block) {
      const float* from = p.own + block * block_floats;
      float* there = p.mailbox[to] + (p.first_block + block) * block_floats;
      for (std::int64_t row = first; row < p.rows; row += step) {
        for (int i = lane; i < p.row_floats; i += kLanes) there[row * p.row_floats + i] = from[row * p.row_floats + i];
      }
    }
  }
  __threadfence_system();
  __syncthreads();
  const int mine = static_cast<int>(threadIdx.x);
  __shared__ int alone;
  if (mine == 0) alone = 0;
  __syncthreads();
  if (mine < p.ranks) {
    if (p.push) raise_flag(p.flags[mine] + p.rank * kPeerBlocks + blockIdx.x, p.turn);
    const unsigned* flag = p.flags[p.rank] + mine * kPeerBlocks + blockIdx.x;
    const std::uint64_t end = now() + p.nanoseconds;
    // A rank may be ahead of this one, so its count may be higher. Signed, because counts go round.
    while (p.merge && static_cast<int>(look_at(flag) - p.turn) < 0) {
      if (now() < end) continue;
      p.missing[mine] = 1;
      alone = 1;
      break;
    }
  }
  __syncthreads();
  if (alone != 0 || !p.merge) return;
  __threadfence_system();
  float* box = p.mailbox[p.rank];
  for (std::int64_t row = first; row < p.rows; row += step) {
    for (int i = 0; i < p.merge_count; ++i) {
      warp_merge_row(box + p.merges[2 * i] * block_floats + row * p.row_floats,
                     box + p.merges[2 * i + 1] * block_floats + row * p.row_floats, p.row_floats);
    }
  }
}

}  // namespace

void start_exchange(const PeerParams& params, cudaStream_t stream) {
  exchange_kernel<<<kPeerBlocks, kThreads, 0, stream>>>(params);
  check(cudaGetLastError(), "exchange between GPUs");
}

void load_exchange() {
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, exchange_kernel), "loading of the exchange");
}

}  // namespace treeattn::kernels::cuda
