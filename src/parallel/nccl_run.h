// SPDX-License-Identifier: Apache-2.0
// One rank's way through one reduction by NCCL: what all strategies need, and the strategies.
#pragma once

#include <functional>
#include <span>

#include "kernels/cuda/device_buffer.h"
#include "parallel/device_nodes.h"
#include "parallel/nccl_communicator.h"
#include "parallel/reduce.h"

namespace treeattn::parallel {

// Device memory handed out piece by piece and taken back all at once.
class Scratch {
 public:
  void begin(std::size_t floats) {
    used_ = 0;
    if (buffer_.bytes() < floats * sizeof(float)) buffer_ = kernels::cuda::DeviceBuffer(floats * sizeof(float));
  }
  float* take(std::size_t floats) {
    float* out = buffer_.as<float>() + used_;
    used_ += floats;
    return out;
  }

 private:
  kernels::cuda::DeviceBuffer buffer_;
  std::size_t used_ = 0;
};

class NcclRun {
 public:
  NcclRun(NcclCommunicator& nccl_communicator, Scratch& memory, const ReduceContext& of, StateShape shape_of_states,
          cudaStream_t on)
      : nccl(nccl_communicator),
        scratch(memory),
        context(of),
        shape{shape_of_states.rows, shape_of_states.row_floats},
        stream(on) {}

  int rank() const { return context.communicator.rank(); }
  int size() const { return context.communicator.size(); }
  // All of this rank's blocks as one; the empty state where it has none.
  float* merged(float* own);
  // Of all ranks' blocks.
  static float* root(DeviceNodes& nodes);
  void copy(float* to, const float* from, std::size_t floats) const;
  // Collective. Puts calls of NCCL, as one group, on the stream; ranks that share GPUs do it together.
  using Calls = std::function<void()>;
  void start(const char* what, const Calls& calls) const;

  NcclCommunicator& nccl;
  Scratch& scratch;
  const ReduceContext& context;
  const kernels::cuda::RowShape shape;
  const cudaStream_t stream;

 private:
  // Returns when all of it is on the streams.
  void start_group(const char* what, std::span<const Calls* const> all) const;
  void start_together(const char* what, const Calls& calls) const;
};

// Each takes this rank's blocks and returns the root's, on the GPU.
float* nccl_two_phases(NcclRun& run, float* own);
float* nccl_as_in_paper(NcclRun& run, float* own);
float* nccl_gather(NcclRun& run, float* own);
// Any schedule but a gather, by sends and receives.
float* nccl_by_schedule(NcclRun& run, const plan::Schedule& schedule, float* own);

}  // namespace treeattn::parallel
