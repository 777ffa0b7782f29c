// SPDX-License-Identifier: Apache-2.0
#include <cuda_pipeline.h>

#include <algorithm>

#include "base/half.h"
#include "kernels/cuda/dependent_launch.cuh"
#include "kernels/cuda/ranks/peer_turn.cuh"

namespace treeattn::kernels::cuda {
namespace {

constexpr int kWarps = kPeerRowsAtOnce;
constexpr int kThreads = kWarps * kLanes;
constexpr std::size_t kSharedBytes = std::size_t{47} << 10;  // a block has 48 KiB without asking for more

__device__ void raise_flag(unsigned* flag, unsigned value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

// Merges follow one another, and each would wait for what the last one wrote: so a row of all states is brought to
// shared memory first, where there is room for it.
__host__ __device__ std::size_t shared_bytes(const PeerParams& p) {
  return kWarps * static_cast<std::size_t>(p.all_blocks) * static_cast<std::size_t>(p.row_floats) * sizeof(float);
}
__host__ __device__ bool fits(const PeerParams& p) { return shared_bytes(p) <= kSharedBytes; }

__device__ void copy_to_shared(const PeerParams& p, const float* from, std::int64_t stride, float* to) {
  for (int block = 0; block < p.all_blocks; ++block) {
    for (int i = warp_lane(); i < p.row_floats; i += kLanes) {
      __pipeline_memcpy_async(to + block * p.row_floats + i, from + block * stride + i, sizeof(float));
    }
  }
  __pipeline_commit();
  __pipeline_wait_prior(0);
}

// The merges of the plan, one after the other, of one row of all states in the hands of a warp. Which they are is read
// for many at once: one that is read when it is needed takes longer than the merge.
__device__ void merge_in_order(const PeerParams& p, int2 first_ones, float* states, std::int64_t stride) {
  const int lane = warp_lane();
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

// Wherever it is wanted.
__device__ void store_root(const PeerParams& p, std::int64_t row, const float* root) {
  for (int i = warp_lane(); i < p.row_floats; i += kLanes) {
    if (p.result != nullptr) p.result[row * p.row_floats + i] = root[i];
    if (p.kept != nullptr) p.kept[row * p.row_floats + i] = root[i];
  }
  if (p.out.values == nullptr) return;
  const int columns = p.row_floats - 2;
  for (int i = warp_lane(); i < columns; i += kLanes) {
    const float value = merge::finished(root[0], root[1], root[2 + i]);
    p.out.values[row * columns + i] = value;
    if (p.out.rounded != nullptr) p.out.rounded[row * columns + i] = base::float_to_bfloat16(value);
  }
}

// One warp, from its rows of this rank's states to those of the root.
class RowExchange {
 public:
  __device__ RowExchange(const PeerParams& params, float* shared) : p(params) {
    const std::int64_t block_floats = p.rows * p.row_floats;
    in_shared_ = fits(p);
    room_ = in_shared_    ? shared + static_cast<int>(threadIdx.x) / kLanes * p.all_blocks * p.row_floats
            : p.ranks > 0 ? p.scratch
                          : p.states;
    stride_ = in_shared_ ? p.row_floats : block_floats;
    first_merges_ = warp_lane() < p.merge_count ? reinterpret_cast<const int2*>(p.merges)[warp_lane()] : int2{};
  }

  // Of ranks on other GPUs.
  __device__ void with_others() const {
    unsigned* const done = p.turns + kernel_warp();
    Turn turn(p, *done + 1);
    if (p.push) {
      turn.say_that_it_is_there();
      each_row([&](std::int64_t row) {
        turn.push_row(row);
        return true;
      });
    }
    if (!p.merge || __any_sync(~0u, *static_cast<volatile unsigned*>(p.turns + kPeerWarps) != 0)) return;
    const bool came = turn.wait_for_silent() && each_row([&](std::int64_t row) {
                        if (!turn.receive_row(row, states_of(row), stride_)) return false;
                        merge_row(row);
                        return true;
                      });
    if (warp_lane() != 0) return;
    if (came) {
      ++*done;
    } else {
      raise_flag(p.turns + kPeerWarps, 1);
    }
  }

  // Of states that are all here.
  __device__ void alone() const {
    each_row([&](std::int64_t row) {
      if (in_shared_) copy_to_shared(p, p.states + row * p.row_floats, p.rows * p.row_floats, room_);
      merge_row(row);
      return true;
    });
  }

 private:
  // Until `work` returns false.
  template <class Work>
  __device__ bool each_row(const Work& work) const {
    for (std::int64_t row = kernel_warp(); row < p.rows; row += kernel_warps()) {
      if (!work(row)) return false;
    }
    return true;
  }
  __device__ float* states_of(std::int64_t row) const { return in_shared_ ? room_ : room_ + row * p.row_floats; }
  __device__ void merge_row(std::int64_t row) const {
    float* const states = states_of(row);
    __syncwarp();
    merge_in_order(p, first_merges_, states, stride_);
    store_root(p, row, states + p.root * stride_);
    __syncwarp();
  }

  const PeerParams& p;
  bool in_shared_;
  float* room_;          // for states of one row, or, not in shared memory, of all
  std::int64_t stride_;  // from block to block
  int2 first_merges_;
};

__global__ void __launch_bounds__(kThreads) exchange_kernel(const __grid_constant__ PeerParams p) {
  let_next_start();
  extern __shared__ __align__(8) float shared[];
  const RowExchange rows(p, shared);
  wait_for_earlier();
  if (p.ranks > 0) return rows.with_others();
  rows.alone();
  if (p.finished == nullptr) return;
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) raise_flag(p.finished + blockIdx.x, p.turn);
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
