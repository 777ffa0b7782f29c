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
constexpr std::size_t kFlagAlignment = 256;

}  // namespace

struct PeerExchange::Impl {
  int gpu = 0;
  int rank = 0;
  ExchangePlan plan;
  std::size_t flag_bytes = 0;
  std::size_t turn_bytes = 0;
  std::unique_ptr<LentMemory> mailbox;  // flags, then the mailboxes of two turns
  DeviceBuffer merges;
  PinnedBuffer told;  // what the kernel tells the host: the root's block, then who is missing [ranks]
  unsigned turn = 0;

  std::size_t ranks() const { return plan.first_block.size() - 1; }
  float* root() const { return reinterpret_cast<float*>(told.data()); }
  unsigned* missing() const { return reinterpret_cast<unsigned*>(root() + plan.block_floats()); }
  PeerParams params() const;
  void start(const float* own, double seconds, void* stream, bool push, bool merge);
};

PeerExchange::PeerExchange(int gpu, int rank, ExchangePlan plan) : impl_(std::make_unique<Impl>()) {
  impl_->gpu = gpu;
  impl_->rank = rank;
  impl_->plan = std::move(plan);
  const std::size_t ranks = impl_->ranks();
  if (ranks > kMostPeers) {
    throw Unavailable(fmt::format("exchange between {} GPUs; accepted: at most {}", ranks, kMostPeers));
  }
  const UseDevice use(gpu);
  load_exchange();
  impl_->flag_bytes = round_up(ranks * kPeerBlocks * sizeof(unsigned), kFlagAlignment);
  const auto blocks = static_cast<std::size_t>(impl_->plan.first_block.back());
  impl_->turn_bytes = round_up(blocks * impl_->plan.block_floats() * sizeof(float), kFlagAlignment);
  impl_->mailbox =
      std::make_unique<LentMemory>(gpu, impl_->flag_bytes + kTurns * impl_->turn_bytes, LentMemory::Others::kWrite);
  check(cudaMemset(impl_->mailbox->own(), 0, impl_->flag_bytes), "clearing of flags");
  impl_->merges = merges_on_gpu(impl_->plan);
  impl_->told.resize(impl_->plan.block_floats() * sizeof(float) + ranks * sizeof(unsigned));
  std::fill_n(impl_->missing(), ranks, 0u);
  check(cudaDeviceSynchronize(), "clearing of flags");
}

PeerExchange::~PeerExchange() = default;

const ExchangePlan& PeerExchange::plan() const { return impl_->plan; }
LentMemory& PeerExchange::mailbox() { return *impl_->mailbox; }

// Where things lie in this turn.
PeerParams PeerExchange::Impl::params() const {
  PeerParams p = merge_params(plan, merges.as<int>(), told);
  const std::size_t box = flag_bytes + turn % kTurns * turn_bytes;
  for (std::size_t r = 0; r < ranks(); ++r) {
    p.flags[r] = reinterpret_cast<unsigned*>(mailbox->of(r));
    p.mailbox[r] = reinterpret_cast<float*>(mailbox->of(r) + box);
  }
  const auto own = static_cast<std::size_t>(rank);
  p.rank = rank;
  p.ranks = static_cast<int>(ranks());
  p.turn = turn;
  p.first_block = plan.first_block[own];
  p.blocks = plan.first_block[own + 1] - plan.first_block[own];
  p.missing = reinterpret_cast<unsigned*>(p.result + plan.block_floats());
  return p;
}

void PeerExchange::Impl::start(const float* own, double seconds, void* stream, bool push, bool merge) {
  PeerParams p = params();
  p.own = own;
  p.push = push;
  p.merge = merge;
  p.nanoseconds = static_cast<std::uint64_t>(seconds * 1e9);
  start_exchange(p, static_cast<cudaStream_t>(stream));
}

const float* PeerExchange::exchange(const float* own, double seconds, void* stream) {
  const UseDevice use(impl_->gpu);
  ++impl_->turn;
  impl_->start(own, seconds, stream, true, true);
  return impl_->root();
}

void PeerExchange::push(const float* own, void* stream) {
  const UseDevice use(impl_->gpu);
  ++impl_->turn;
  impl_->start(own, 0, stream, true, false);
  impl_->mailbox->mark(impl_->turn, stream);
}

const float* PeerExchange::merge(double seconds, void* stream) {
  const UseDevice use(impl_->gpu);
  impl_->mailbox->wait_for_marks(impl_->turn, stream);
  impl_->start(nullptr, seconds, stream, false, true);
  return impl_->root();
}

std::vector<int> PeerExchange::missing() const {
  std::vector<int> out;
  for (std::size_t r = 0; r < impl_->ranks(); ++r) {
    if (static_cast<volatile unsigned*>(impl_->missing())[r] != 0) out.push_back(static_cast<int>(r));
  }
  return out;
}

}  // namespace treeattn::kernels::cuda
