// SPDX-License-Identifier: Apache-2.0
// Reduction of states that are on GPUs and travel from GPU to GPU: what reduce.h does by way of the host.
#pragma once

#include <memory>

#include "kernels/cuda/ranks/rank_device.h"
#include "parallel/reduce.h"
#include "treeattn/strategy.h"

namespace treeattn::parallel {

// Of the time that the communicator gives a call: the rest is for finding out who is missing.
inline constexpr double kShareOfDeadline = 0.5;

// One per rank, for one communicator and one GPU.
class DeviceReducer {
 public:
  virtual ~DeviceReducer() = default;
  // Collective. What the first reduce() would begin with, for those who want to know early whether there is such a way:
  // throws Unavailable where there is none.
  virtual void connect(Communicator&, kernels::cuda::RankDevice&) {}
  // Collective. Where on its GPU a rank's blocks for the next reduce() are best put; null: anywhere.
  virtual float* place(const ReduceContext&, StateShape, kernels::cuda::RankDevice&) { return nullptr; }
  // Collective. own: the blocks of this rank's nodes on its GPU (null where there are none), ready on the device's
  // stream; used up. Copies the root's block to the host's memory. Throws LostRanks as the communicator does, Error
  // when the GPUs failed though all ranks are there, Unavailable the first time where there is no such way.
  virtual void reduce(Strategy strategy, const plan::Schedule& schedule, const ReduceContext& context, StateShape shape,
                      float* own, kernels::cuda::RankDevice& device, float* root) = 0;
  // The same with the root's block left on the GPU, where the stream finds it until this rank next attends; the host
  // does not wait for the GPU. Null, with nothing done, where place() is.
  virtual const float* reduce_on_gpu(const ReduceContext&, kernels::cuda::RankDevice&) { return nullptr; }
};

// By NCCL: its collectives for kTwoPhase, kPaper and kGather, its send and receive for the other schedules. Throws
// Unavailable in a build without it.
std::unique_ptr<DeviceReducer> nccl_reducer();
// By one kernel that writes into the memory of the other GPUs (kernels/cuda/ranks/peer_exchange.h): in the canonical
// order, whatever the strategy.
std::unique_ptr<DeviceReducer> peer_reducer();

}  // namespace treeattn::parallel
