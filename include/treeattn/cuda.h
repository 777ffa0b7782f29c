// SPDX-License-Identifier: Apache-2.0
// Attention on an NVIDIA GPU: the same call as treeattn/attention.h, with the data on the device. First plan, then run:
// a plan checks, uploads and allocates everything once; a run is one kernel launch on a stream, of a prompt two, and
// can be captured in a CUDA graph. This header needs no CUDA; in a build without it everything says so.
//
//   treeattn::CudaPlan plan(0, in, {});       // in: device pointers
//   plan.attention(out, lse, stream);
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "treeattn/attention.h"

namespace treeattn {

struct CudaDevice {
  int index = 0;
  std::string name;
  int compute_major = 0, compute_minor = 0;
  int multiprocessors = 0;
  std::size_t memory_bytes = 0;
};

// The GPUs that this build can use; none when there are none. cuda_problem() then says why. Uses none of them: what
// needs a GPU takes some of its memory.
std::vector<CudaDevice> cuda_devices();
// Free memory of one. Throws Unavailable where there is no such GPU.
std::size_t cuda_free_bytes(int device);
// Empty when there is a GPU to use; else why not, with the versions where the driver is too old.
std::string cuda_problem();

// One attention call, planned. q, k and v of `in` (their data and scales) point to device memory, which must stay where
// it is; its content may change between runs. Page tables, lengths, positions, slopes and sinks are in host memory and
// are copied. Not thread-safe, and a run must not begin before the plan's last one has ended, as on one stream it does
// not; several plans may run at the same time on different streams.
class CudaPlan {
 public:
  // Throws InvalidArgument as attention() does, Unavailable where there is no such device or too little memory.
  CudaPlan(int device, const AttentionInput& in, const AttentionOptions& options);
  ~CudaPlan();
  CudaPlan(CudaPlan&&) noexcept;
  CudaPlan& operator=(CudaPlan&&) noexcept;

  // out [batch, queries, heads, v.head_dim] and lse [batch, queries, heads] or null: float32, device memory. stream: a
  // cudaStream_t. The bits depend on inputs, options, order and the GPU's compute capability alone: not on its size,
  // the batch or the other work on it. Nothing waits. Both throw InvalidArgument where there is no
  // place for the result, Unavailable when the GPU says no.
  void attention(float* out, float* lse, void* stream);
  // states [batch, queries, heads, v.head_dim + 2], device memory: stopped before the sinks and the division.
  void attention_states(float* states, void* stream);

  // GPU memory of this plan: copies of the tables, the list of work, and states on their way.
  std::size_t workspace_bytes() const;
  // Which kernel serves the call: "generic", "mma" (16-bit K and V), "mma8" (8-bit K and V), "mma32"
  // (float32 K and V), "prefill" (many queries).
  std::string kernel() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace treeattn
