// SPDX-License-Identifier: Apache-2.0
// Ranks that are threads of one process with one GPU: everybody's attention writes its states into one mailbox, and the
// last rank to come puts one merge behind the work of all. This header needs no CUDA.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/cuda/ranks/peer_exchange.h"

namespace treeattn::kernels::cuda {

// Made by one rank for all of them. Every turn, on every rank: attention into place(), arrive(), a barrier of the
// threads, then wait() or follow(). The result must be used before the next turn: by the host before it calls arrive(),
// by a stream before it comes to the next attention. Throws Unavailable naming what failed.
class CommonMailbox {
 public:
  CommonMailbox(int gpu, ExchangePlan plan);
  ~CommonMailbox();
  CommonMailbox(const CommonMailbox&) = delete;
  CommonMailbox& operator=(const CommonMailbox&) = delete;

  const ExchangePlan& plan() const;
  // Where a rank's blocks go, on the GPU.
  float* place(int rank) const;
  // A rank's will be there when its stream has come to here. The last rank's stream gets the merge. Returns the turn.
  std::uint64_t arrive(void* stream);
  // Until the root's block of this turn is there: its place, in the host's memory. All ranks must have arrived; stream:
  // this rank's, to be asked for errors.
  const float* wait(std::uint64_t turn, void* stream) const;
  // The same for a stream, without the host: what is put there from now on finds the root's block here, on the GPU.
  const float* follow(void* stream) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace treeattn::kernels::cuda
