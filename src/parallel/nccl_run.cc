// SPDX-License-Identifier: Apache-2.0
#include "parallel/nccl_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/this_process.h"
#include "parallel/agree.h"
#include "parallel/lend.h"
#include "treeattn/error.h"

namespace treeattn::parallel {
namespace {

// What a rank lends to the thread that starts the calls of its process.
struct Offer {
  std::uint64_t process;
  const NcclRun::Calls* calls;
  std::atomic<bool>* used;
};

// Where a rank of another process is lost in between, the thread that was lent something may not know of it yet.
void let_go_of(const std::atomic<bool>& used) {
  constexpr std::chrono::seconds kMost{1};
  const auto start = std::chrono::steady_clock::now();
  while (!used && std::chrono::steady_clock::now() - start < kMost) std::this_thread::yield();
}

}  // namespace

float* NcclRun::merged(float* own) {
  const std::size_t blocks = context.shares.nodes_of(rank()).size();
  if (blocks == 0) {
    own = scratch.take(shape.floats());
    kernels::cuda::clear_rows(own, shape, stream);
    return own;
  }
  std::vector<kernels::cuda::MergeStep> steps;
  for (std::size_t i = 1; i < blocks; ++i) steps.push_back({own, own + i * shape.floats()});
  kernels::cuda::merge_blocks(steps, shape, stream);
  return own;
}

float* NcclRun::root(DeviceNodes& nodes) {
  if (nodes.nodes().size() != 1) throw Error("internal: a reduction ended with more than its root");
  return nodes.blocks().front();
}

void NcclRun::copy(float* to, const float* from, std::size_t floats) const {
  kernels::cuda::copy_floats(to, from, floats, stream);
}

void NcclRun::start(const char* what, const Calls& calls) const {
  if (nccl.shares_gpus()) return start_together(what, calls);
  if (nccl.shares_a_process()) context.communicator.barrier();
  const Calls* mine = &calls;
  start_group(what, {&mine, 1});
}

void NcclRun::start_group(const char* what, std::span<const Calls* const> all) const {
  nccl.begun(ncclGroupStart(), "ncclGroupStart");
  try {
    for (const Calls* calls : all) (*calls)();
  } catch (const NcclFailure&) {
    ncclGroupEnd();
    throw;
  }
  nccl.begun(ncclGroupEnd(), what);
  nccl.settle(what);
}

// NCCL's kernels wait for each other, and on one GPU much may keep a kernel from being started while another one waits
// there: a kernel that is loaded when it is first used, memory that is freed, work of another stream in the same queue
// of the GPU. So the streams of all ranks are empty when the first is started, one thread starts those of its
// process, as one group, and nobody does anything more on the GPU before all are started.
void NcclRun::start_together(const char* what, const Calls& calls) const {
  nccl.wait(stream);
  Communicator& comm = context.communicator;
  std::atomic<bool> used = false;
  const Offer mine{base::this_process(), &calls, &used};
  std::vector<Offer> here = gathered(comm, mine);
  std::erase_if(here, [&](const Offer& offer) { return offer.process != mine.process; });
  if (!may_share_memory(comm)) here.assign(1, mine);
  std::string failure;
  if (here.front().calls == &calls) {
    try {
      std::vector<const Calls*> all;
      for (const Offer& offer : here) all.push_back(offer.calls);
      start_group(what, all);
    } catch (const NcclFailure& error) {
      failure = error.what;
    }
    for (const Offer& offer : here) *offer.used = true;
  }
  std::optional<int> first;
  try {
    first = first_failed(comm, !failure.empty());
  } catch (const LostRanks&) {
    let_go_of(used);
    throw;
  }
  if (!first) return nccl.settle(what);
  throw NcclFailure{failure.empty() ? fmt::format("{}: failed on rank {}", what, *first) : failure};
}

}  // namespace treeattn::parallel
