// SPDX-License-Identifier: Apache-2.0
#include "base/read_bandwidth.h"
#include "kernels/cuda/ranks/rank_device.h"
#include "parallel/agree.h"
#include "parallel/kv_memory.h"
#include "treeattn/kv_cache.h"

namespace treeattn {
namespace {

// Far more than any cache holds.
constexpr std::size_t kBytes = std::size_t{512} << 20;

double measured(int gpu, ThreadPool& pool) {
  if (gpu >= 0) return kernels::cuda::RankDevice(gpu).read_bandwidth(kBytes);
  return base::read_bandwidth(pool, kBytes, 3);
}

}  // namespace

std::vector<double> bandwidth_weights(Communicator& communicator, int gpu, ThreadPool& pool) {
  parallel::check_gpu(gpu);
  communicator.barrier();  // all at once, as they will decode
  return parallel::gathered(communicator, measured(gpu, pool));
}

}  // namespace treeattn
