// SPDX-License-Identifier: Apache-2.0
// NCCL's communicator with a deadline. The communicator that is there anyway (threads, MPI, TCP) brings the ranks
// together and says who is lost. NCCL is used without blocking, so that nothing waits for ever.
#pragma once

#include <cuda_runtime.h>
#include <nccl.h>

#include <functional>
#include <string>

#include "treeattn/communicator.h"

namespace treeattn::parallel {

// NCCL or the GPU failed, or took too long. Not for callers of the library: see NcclReducer::reduce.
struct NcclFailure {
  std::string what;
};

// Made once, aborted when something fails.
class NcclCommunicator {
 public:
  NcclCommunicator() = default;
  ~NcclCommunicator() { abort(); }
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  bool made() const { return comm_ != nullptr; }
  ncclComm_t get() const { return comm_; }
  // Whether two ranks, no matter which, have one GPU: the same on all.
  bool shares_gpus() const { return shares_gpus_; }
  // The same, with one process.
  bool shares_a_process() const { return shares_a_process_; }

  // Collective. Throws Unavailable on every rank when it fails on one.
  void make(Communicator& ranks, int gpu);
  void abort();
  // How long each of the calls below may take. They throw NcclFailure.
  void within(Seconds deadline) { within_ = deadline; }

  // One call of NCCL, begun.
  void begun(ncclResult_t result, const char* what) const;
  // Until what was begun is on the stream.
  void settle(const char* what) const;
  // Until the stream is done.
  void wait(cudaStream_t stream) const;

 private:
  ncclResult_t state(const char* what) const;
  void until(const char* what, const std::function<bool()>& ready) const;

  ncclComm_t comm_ = nullptr;
  bool shares_gpus_ = false, shares_a_process_ = false;
  Seconds within_{1};
};

}  // namespace treeattn::parallel
