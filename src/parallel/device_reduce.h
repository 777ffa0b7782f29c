// SPDX-License-Identifier: Apache-2.0
// Reduction of states that are on GPUs and travel from GPU to GPU: what reduce.h does by way of the host.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/cuda/ranks/peer_exchange.h"
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
  // Collective. Where on its GPU a rank's blocks for the next reduction are best put; null: anywhere, and the root
  // cannot stay on the GPU.
  virtual float* place(const ReduceContext&, StateShape, kernels::cuda::RankDevice&) { return nullptr; }
  // Collective. own: the blocks of this rank's nodes on its GPU (null where there are none), ready on the device's
  // stream; used up. Copies the root's block to the host's memory. Throws LostRanks as the communicator does, Error
  // when the GPUs failed though all ranks are there, Unavailable the first time where there is no such way.
  virtual void reduce(Strategy strategy, const plan::Schedule& schedule, const ReduceContext& context, StateShape shape,
                      float* own, kernels::cuda::RankDevice& device, float* root) = 0;
  // The same, where place() is not null and the blocks are there, with what the root comes to left on the GPU, as work
  // on the stream. The host may wait for the other ranks, not for the GPU; while the stream is being recorded for none
  // of them. out.rounded: only where it can be recorded.
  virtual void reduce_on_gpu(const ReduceContext&, StateShape, kernels::cuda::RankDevice&, kernels::cuda::FinishedRows,
                             void* /*stream*/) {}
  // After place(): what a recording of reduce_on_gpu() depends on, never 0; 0 where the host has a part in it.
  virtual std::int64_t recording() const { return 0; }
  // What one reduce_on_gpu() sends to other GPUs, into the communicator's traffic: who repeats it says how often.
  virtual void count_sent(Communicator&) const {}
  // Once the host has waited for the stream: throws as reduce() does, where what reduce_on_gpu() left is worthless.
  virtual void confirm(Communicator&) {}
};

// By NCCL: its collectives for kTwoPhase, kPaper and kGather, its send and receive for the other schedules. Throws
// Unavailable in a build without it.
std::unique_ptr<DeviceReducer> nccl_reducer();
// By one kernel that writes into the memory of the other GPUs (kernels/cuda/ranks/peer_exchange.h): in the canonical
// order, whatever the strategy.
std::unique_ptr<DeviceReducer> peer_reducer();

}  // namespace treeattn::parallel
