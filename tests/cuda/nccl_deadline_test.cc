// SPDX-License-Identifier: Apache-2.0
// A collective of NCCL for which a rank never comes. Needs an NCCL that lets two ranks share a GPU, 2.30 or later.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "cuda/device_case.h"
#include "cuda/nccl_refusal.h"
#include "parallel/nccl_communicator.h"
#include "treeattn/cuda.h"
#include "treeattn/error.h"

namespace treeattn::parallel {
namespace {

constexpr int kGpu = 0;

bool done_within(cudaStream_t stream, Seconds seconds) {
  const auto start = std::chrono::steady_clock::now();
  while (cudaStreamQuery(stream) == cudaErrorNotReady) {
    if (std::chrono::steady_clock::now() - start > seconds) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

TEST(NcclDeadline, EndsAKernelThatWaitsForARankThatNeverComes) {
  if (!cuda_problem().empty()) GTEST_SKIP() << "*** SKIPPED: " << cuda_problem() << " ***";
  let_ranks_share_a_gpu();
  ::setenv("NCCL_RUNTIME_CONNECT", "0", 1);  // or it would be the host that waits, to connect
  NcclProblem problem;
  std::atomic<bool> started = false, failed = false, freed = false;
  run_ranks(2, [&](std::shared_ptr<Communicator> world) {
    NcclCommunicator nccl;
    try {
      nccl.make(*world, kGpu);
    } catch (const Unavailable& error) {
      problem.add(error);
      return;
    }
    if (world->rank() == 0) {
      constexpr std::size_t kFloats = 1000;
      const kernels::DeviceMemory data(kFloats * sizeof(float));
      cudaStream_t stream = nullptr;
      kernels::cuda_check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
      nccl.within(Seconds(1.0));
      try {
        nccl.begun(ncclAllReduce(data.as<float>(), data.as<float>(), kFloats, ncclFloat, ncclSum, nccl.get(), stream),
                   "ncclAllReduce");
        nccl.settle("ncclAllReduce");
        started = true;
        nccl.wait(stream);
      } catch (const NcclFailure&) {
        failed = true;
      }
      nccl.abort();
      freed = done_within(stream, Seconds(10.0));
      if (freed) cudaStreamDestroy(stream);
    }
    world->barrier();
  });
  ASSERT_EQ(problem.failure(), "");
  if (!problem.refusal().empty()) GTEST_SKIP() << "*** SKIPPED: 2 ranks on one GPU: " << problem.refusal() << " ***";
  EXPECT_TRUE(started);
  EXPECT_TRUE(failed);
  EXPECT_TRUE(freed);
}

}  // namespace
}  // namespace treeattn::parallel
