// SPDX-License-Identifier: Apache-2.0
// Ranks that share a GPU over NCCL: whether that can be tested here.
#pragma once

#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "decode_loop.h"
#include "treeattn/error.h"

namespace treeattn {

// Whether NCCL does not let ranks share a GPU, as before 2.30.
inline bool nccl_refuses_to_share(const Unavailable& error) {
  return std::string_view(error.what()).find("invalid usage") != std::string_view::npos;
}

// One token over NCCL with every rank on the same GPU: throws Unavailable where NCCL does not let them.
inline void decode_over_nccl(const std::shared_ptr<Communicator>& world, int gpu) {
  const testing_parallel::Loop loop;
  ThreadPool pool(1);
  KvCache cache(world, loop.config(), {}, gpu);
  ParallelAttention attention(world, {Strategy::kMerge, true, DeviceLink::kNccl});
  const SequenceId id = cache.add_sequence();
  loop.append(cache, id, 0, testing_parallel::Loop::kPrompt + 1);
  loop.decode(attention, cache, id, 0, pool);
}

// NCCL 2.30 and later let several ranks have one GPU when told to.
inline void let_ranks_share_a_gpu() { ::setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1); }

// Why ranks that are threads could not have NCCL. One that was refused tells for all; anything else is a failure.
class NcclProblem {
 public:
  void add(const Unavailable& error) {
    const std::scoped_lock lock(mutex_);
    (nccl_refuses_to_share(error) ? refusal_ : failure_) = error.what();
  }
  const std::string& refusal() const { return refusal_; }
  std::string failure() const { return refusal_.empty() ? failure_ : ""; }

 private:
  std::mutex mutex_;
  std::string refusal_, failure_;
};

}  // namespace treeattn
