// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "kernels/cuda/ranks/exchange_params.h"
#include "treeattn/error.h"

namespace treeattn::kernels::cuda {
namespace {

// One turn is being read while the next is being written: a rank is at most one ahead, as it needs what all have sent.
constexpr std::size_t kTurns = 2;

}  // namespace

struct PeerExchange::Impl {
  int gpu = 0;
  ExchangePlan plan;
  bool overlaps = false;                // kernels may be started early
  std::unique_ptr<LentMemory> mailbox;  // of two turns
  DeviceBuffer own;                     // this rank's blocks
  DeviceBuffer merges, turns, scratch;
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
  const auto blocks = static_cast<std::size_t>(shape.first_block.back());
  const std::size_t words = blocks * shape.block_floats() + 2 * ranks * kPeerWarps;
  const std::size_t mailbox_bytes = kTurns * words * sizeof(PeerWord);
  impl_->mailbox = std::make_unique<LentMemory>(gpu, mailbox_bytes, LentMemory::Others::kWrite);
  check(cudaMemset(impl_->mailbox->own(), 0, mailbox_bytes), "clearing of the mailbox");
  impl_->own = DeviceBuffer(std::max<std::size_t>((last - first) * block_bytes, 1));
  impl_->scratch = DeviceBuffer(blocks * block_bytes);
  impl_->merges = merges_on_gpu(shape);
  impl_->turns = DeviceBuffer((kPeerWarps + 1) * sizeof(unsigned));
  check(cudaMemset(impl_->turns.as<void>(), 0, impl_->turns.bytes()), "clearing of counters");
  impl_->told.resize(block_bytes + ranks * sizeof(unsigned));
  std::fill_n(impl_->missing(), ranks, 0u);
  PeerParams& p = impl_->params;
  p = merge_params(shape, impl_->merges.as<int>(), impl_->told);
  p.mailbox_words = static_cast<std::int64_t>(words);
  std::ranges::copy(shape.first_block, p.first_block);
  p.some_have_none = std::ranges::adjacent_find(shape.first_block) != shape.first_block.end();
  p.scratch = impl_->scratch.as<float>();
  p.rank = rank;
  p.ranks = static_cast<int>(ranks);
  p.turns = impl_->turns.as<unsigned>();
  p.own = impl_->own.as<float>();
  p.missing = reinterpret_cast<unsigned*>(p.result + shape.block_floats());
  check(cudaDeviceSynchronize(), "clearing of the mailbox");
}

PeerExchange::~PeerExchange() = default;

const ExchangePlan& PeerExchange::plan() const { return impl_->plan; }
LentMemory& PeerExchange::mailbox() { return *impl_->mailbox; }
float* PeerExchange::own() const { return impl_->own.as<float>(); }
const float* PeerExchange::root() const { return impl_->root(); }

void PeerExchange::Impl::start(PeerParams call, double seconds, FinishedRows out, bool early, void* stream) const {
  for (std::size_t r = 0; r < ranks(); ++r) {
    call.mailbox[r] = reinterpret_cast<PeerWord*>(mailbox->of(r));
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

bool PeerExchange::is_recorded(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status), "recording");
  return status != cudaStreamCaptureStatusNone;
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
