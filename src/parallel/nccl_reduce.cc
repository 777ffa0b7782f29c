// SPDX-License-Identifier: Apache-2.0
// States from GPU to GPU by NCCL.
#include <fmt/format.h>

#include "parallel/device_reduce.h"
#include "parallel/nccl_run.h"
#include "treeattn/error.h"
#include "treeattn/parallel_attention.h"

namespace treeattn {

bool nccl_available() { return true; }

namespace parallel {
namespace {

class NcclReducer final : public DeviceReducer {
 public:
  void connect(Communicator& comm, kernels::cuda::RankDevice& device) override {
    const kernels::cuda::UseDevice use(device.gpu());
    if (!nccl_.made()) nccl_.make(comm, device.gpu());
  }

  void reduce(Strategy strategy, const plan::Schedule& schedule, const ReduceContext& context, StateShape shape,
              float* own, kernels::cuda::RankDevice& device, float* root) override {
    Communicator& comm = context.communicator;
    const kernels::cuda::UseDevice use(device.gpu());
    connect(comm, device);
    nccl_.within(kShareOfDeadline * comm.deadline());
    try {
      const auto stream = static_cast<cudaStream_t>(device.stream());
      NcclRun run(nccl_, scratch_, context, shape, stream);
      const float* result = run_strategy(run, strategy, schedule, own);
      nccl_.wait(stream);
      device.fetch(root, result, shape.block_floats() * sizeof(float));
    } catch (const NcclFailure& failure) {
      nccl_.abort();   // ends what waits on the GPU, on the other ranks too
      comm.barrier();  // says who is lost, the same on all survivors
      throw Error(fmt::format("NCCL failed though all ranks are there: {}", failure.what));
    } catch (const LostRanks&) {
      nccl_.abort();  // or its kernels would go on waiting
      throw;
    }
  }

 private:
  static float* run_strategy(NcclRun& run, Strategy strategy, const plan::Schedule& schedule, float* own) {
    switch (strategy) {
      case Strategy::kPaper:
        return nccl_as_in_paper(run, own);
      case Strategy::kTwoPhase:
        return nccl_two_phases(run, own);
      case Strategy::kGather:
        return nccl_gather(run, own);
      default:
        return nccl_by_schedule(run, schedule, own);
    }
  }

  NcclCommunicator nccl_;
  Scratch scratch_;
};

}  // namespace

std::unique_ptr<DeviceReducer> nccl_reducer() { return std::make_unique<NcclReducer>(); }

}  // namespace parallel
}  // namespace treeattn
