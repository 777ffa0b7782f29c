// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/round_up.h"
#include "kernels/cuda/ranks/exchange_params.h"
#include "treeattn/error.h"

namespace treeattn::kernels::cuda {
namespace {

using base::round_up;

// One turn is being read while the next is being written: a rank is at most one ahead, as it needs everybody's flag.
constexpr std::size_t kTurns = 2;
constexpr std::size_t kAlignment = 256;

}  // namespace

struct PeerExchange::Impl {
  int gpu = 0;
  ExchangePlan plan;
  std::size_t flag_bytes = 0;
  bool overlaps = false;                // kernels may be started early
  std::unique_ptr<LentMemory> mailbox;  // flags, then the mailboxes of two turns
  DeviceBuffer own;                     // this rank's blocks
  DeviceBuffer merges, counters;
  PinnedBuffer told;    // what the kernel tells the host: the root's block, then who is missing [ranks]
  PeerParams params;    // but for what changes from call to call
  unsigned pushes = 0;  // of halves

  std::size_t ranks() const { return plan.first_block.size() - 1; }
  float* root() const { return reinterpret_cast<float*>(told.data()); }
  unsigned* missing() const { return reinterpret_cast<unsigned*>(root() + plan.block_floats()); }
  void start(PeerParams call, double seconds, FinishedRows out, bool early, void* stream) const;
};

PeerExchange::PeerExchange(int gpu, int rank, ExchangePlan plan) : impl_(std::make_unique<Impl>()) {
  impl_->gpu = gpu;
  impl_->plan = std::move(plan);
  const ExchangePlan& shape = impl_->plan;
  const std::size_t ranks = impl_->ranks();
  if (ranks > kMostPeers) {
    throw Unavailable(fmt::format("exchange between {} GPUs; accepted: at most {}", ranks, kMostPeers));
  }
  const UseDevice use(gpu);
  load_exchange();
  const std::size_t block_bytes = shape.block_floats() * sizeof(float);
  const auto first = static_cast<std::size_t>(shape.first_block[static_cast<std::size_t>(rank)]),
             last = static_cast<std::size_t>(shape.first_block[static_cast<std::size_t>(rank) + 1]);
  impl_->overlaps = code_is_for_hopper();
  impl_->flag_bytes = round_up(ranks * kPeerBlocks * sizeof(unsigned), kAlignment);
  const std::size_t turn_bytes = round_up(static_cast<std::size_t>(shape.first_block.back()) * block_bytes, kAlignment);
  impl_->mailbox =
      std::make_unique<LentMemory>(gpu, impl_->flag_bytes + kTurns * turn_bytes, LentMemory::Others::kWrite);
  check(cudaMemset(impl_->mailbox->own(), 0, impl_->flag_bytes), "clearing of flags");
  impl_->own = DeviceBuffer(std::max((last - first) * block_bytes, kAlignment));
  impl_->merges = merges_on_gpu(shape);
  impl_->counters = DeviceBuffer(kPeerCounters * sizeof(unsigned));
  check(cudaMemset(impl_->counters.as<void>(), 0, impl_->counters.bytes()), "clearing of counters");
  impl_->told.resize(block_bytes + ranks * sizeof(unsigned));
  std::fill_n(impl_->missing(), ranks, 0u);
  PeerParams& p = impl_->params;
  p = merge_params(shape, impl_->merges.as<int>(), impl_->told);
  p.odd_turns = static_cast<std::int64_t>(turn_bytes / sizeof(float));
  p.rank = rank;
  p.ranks = static_cast<int>(ranks);
  p.turns = impl_->counters.as<unsigned>();
  p.own = impl_->own.as<float>();
  p.first_block = static_cast<int>(first);
  p.blocks = static_cast<int>(last - first);
  p.missing = reinterpret_cast<unsigned*>(p.result + shape.block_floats());
  check(cudaDeviceSynchronize(), "clearing of flags");
}

PeerExchange::~PeerExchange() = default;

const ExchangePlan& PeerExchange::plan() const { return impl_->plan; }
LentMemory& PeerExchange::mailbox() { return *impl_->mailbox; }
float* PeerExchange::own() const { return impl_->own.as<float>(); }
const float* PeerExchange::root() const { return impl_->root(); }

void PeerExchange::Impl::start(PeerParams call, double seconds, FinishedRows out, bool early, void* stream) const {
  for (std::size_t r = 0; r < ranks(); ++r) {
    call.flags[r] = reinterpret_cast<unsigned*>(mailbox->of(r));
    call.mailbox[r] = reinterpret_cast<float*>(mailbox->of(r) + flag_bytes);
  }
  call.nanoseconds = static_cast<std::uint64_t>(seconds * 1e9);
  call.out = out;
  if (out.values != nullptr) call.result = nullptr;
  const UseDevice use(gpu);
  start_exchange(call, early, static_cast<cudaStream_t>(stream));
}

void PeerExchange::exchange(double seconds, FinishedRows out, void* stream) {
  impl_->start(impl_->params, seconds, out, impl_->overlaps, stream);
}

void PeerExchange::push(void* stream) {
  PeerParams call = impl_->params;
  call.merge = false;
  impl_->start(call, 0, {}, false, stream);
  impl_->mailbox->mark(++impl_->pushes, stream);
}

void PeerExchange::merge(double seconds, FinishedRows out, void* stream) {
  const UseDevice use(impl_->gpu);
  impl_->mailbox->wait_for_marks(impl_->pushes, stream);
  PeerParams call = impl_->params;
  call.push = false;
  impl_->start(call, seconds, out, false, stream);
}

std::vector<int> PeerExchange::missing() const {
  std::vector<int> out;
  for (std::size_t r = 0; r < impl_->ranks(); ++r) {
    if (static_cast<volatile unsigned*>(impl_->missing())[r] != 0) out.push_back(static_cast<int>(r));
  }
  return out;
}

}  // namespace treeattn::kernels::cuda
