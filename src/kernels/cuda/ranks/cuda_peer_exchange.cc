// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/this_process.h"
#include "kernels/cuda/ranks/exchange_params.h"
#include "treeattn/error.h"

namespace treeattn::kernels::cuda {
namespace {

// One turn is being read while the next is being written: a rank is at most one ahead, as it needs everybody's flag.
constexpr std::size_t kTurns = 2;
constexpr std::size_t kFlagAlignment = 256;
// What the driver lends to other processes: smaller things would lie in one piece with others.
constexpr std::size_t kLent = std::size_t{2} << 20;

// What others write to, and what threads of this process may wait for without the host: that this rank has written to
// them. An event for each turn, like the mailboxes.
struct Mailbox {
  explicit Mailbox(std::size_t bytes) : memory(bytes) {
    for (cudaEvent_t& event : pushed) check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "event");
  }
  ~Mailbox() {
    for (cudaEvent_t event : pushed) cudaEventDestroy(event);
  }
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  DeviceBuffer memory;  // flags, then the mailboxes of two turns
  std::array<cudaEvent_t, kTurns> pushed{};
};
using SharedMailbox = std::shared_ptr<Mailbox>;

struct Where {
  std::uint64_t process = 0;
  const SharedMailbox* mailbox = nullptr;  // for threads of that process
  int gpu = 0;
  cudaIpcMemHandle_t handle{};
};
static_assert(sizeof(Where) <= sizeof(PeerExchange::Address));

Where where(const PeerExchange::Address& address) {
  Where out;
  std::memcpy(&out, address.data(), sizeof out);
  return out;
}

// From the current GPU to another.
void enable_access(int gpu, std::size_t rank) {
  const cudaError_t error = cudaDeviceEnablePeerAccess(gpu, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();
  } else {
    check(error, fmt::format("memory of rank {}, on GPU {}", rank, gpu).c_str());
  }
}

std::size_t aligned(std::size_t bytes, std::size_t to = kFlagAlignment) { return (bytes + to - 1) / to * to; }

}  // namespace

struct PeerExchange::Impl {
  int gpu = 0;
  int rank = 0;
  ExchangePlan plan;
  std::size_t flag_bytes = 0;
  std::size_t turn_bytes = 0;
  SharedMailbox mailbox;
  DeviceBuffer merges;
  PinnedBuffer told;                // what the kernel tells the host: the root's block, then who is missing [ranks]
  std::vector<std::byte*> peers;    // [ranks] everybody's memory, as this GPU sees it
  std::vector<void*> opened;        // of these, what other processes lend
  std::vector<SharedMailbox> held;  // and what threads do: it stays when they go, as someone may be writing to it
  bool lent = false;                // other processes may have this one's open
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
  impl_->flag_bytes = aligned(ranks * kPeerBlocks * sizeof(unsigned));
  const auto blocks = static_cast<std::size_t>(impl_->plan.first_block.back());
  impl_->turn_bytes = aligned(blocks * impl_->plan.block_floats() * sizeof(float));
  impl_->mailbox = std::make_shared<Mailbox>(aligned(impl_->flag_bytes + kTurns * impl_->turn_bytes, kLent));
  check(cudaMemset(impl_->mailbox->memory.as<void>(), 0, impl_->flag_bytes), "clearing of flags");
  impl_->merges = merges_on_gpu(impl_->plan);
  impl_->told.resize(impl_->plan.block_floats() * sizeof(float) + ranks * sizeof(unsigned));
  std::fill_n(impl_->missing(), ranks, 0u);
  check(cudaDeviceSynchronize(), "clearing of flags");
}

PeerExchange::~PeerExchange() {
  int before = 0;
  cudaGetDevice(&before);
  cudaSetDevice(impl_->gpu);
  for (void* memory : impl_->opened) cudaIpcCloseMemHandle(memory);
  // Other processes may write to it yet, having heard of nothing: then it stays until this one ends.
  if (impl_->lent) new SharedMailbox(std::move(impl_->mailbox));
  impl_->mailbox.reset();
  impl_->held.clear();
  cudaSetDevice(before);
}

void PeerExchange::disconnect() {
  const UseDevice use(impl_->gpu);
  for (void* memory : impl_->opened) cudaIpcCloseMemHandle(memory);
  impl_->opened.clear();
  impl_->held.clear();
  impl_->peers.clear();
}

void PeerExchange::take_back() { impl_->lent = false; }

const ExchangePlan& PeerExchange::plan() const { return impl_->plan; }

PeerExchange::Address PeerExchange::address() const {
  const UseDevice use(impl_->gpu);
  Where mine;
  mine.process = base::this_process();
  mine.mailbox = &impl_->mailbox;
  mine.gpu = impl_->gpu;
  if (cudaIpcGetMemHandle(&mine.handle, impl_->mailbox->memory.as<void>()) != cudaSuccess) {
    cudaGetLastError();  // no other process can reach it then, which open says there
    mine.handle = {};
  }
  Address out{};
  std::memcpy(out.data(), &mine, sizeof mine);
  return out;
}

void PeerExchange::connect(std::span<const Address> all) {
  const UseDevice use(impl_->gpu);
  // They reach this one even if it does not reach them.
  impl_->lent = std::ranges::any_of(all, [](const Address& a) { return where(a).process != base::this_process(); });
  for (std::size_t r = 0; r < all.size(); ++r) {
    const Where other = where(all[r]);
    void* memory = nullptr;
    if (other.process != base::this_process()) {
      check(cudaIpcOpenMemHandle(&memory, other.handle, cudaIpcMemLazyEnablePeerAccess),
            fmt::format("memory of rank {}, of another process", r).c_str());
      impl_->opened.push_back(memory);
    } else {
      if (other.gpu != impl_->gpu) enable_access(other.gpu, r);
      impl_->held.push_back(*other.mailbox);
      memory = impl_->held.back()->memory.as<void>();
    }
    impl_->peers.push_back(static_cast<std::byte*>(memory));
  }
}

bool PeerExchange::share_a_gpu(std::span<const Address> all) {
  for (std::size_t a = 0; a < all.size(); ++a) {
    for (std::size_t b = a + 1; b < all.size(); ++b) {
      const Where one = where(all[a]), other = where(all[b]);
      if (one.process == other.process && one.gpu == other.gpu) return true;
    }
  }
  return false;
}

// Where things lie in this turn.
PeerParams PeerExchange::Impl::params() const {
  PeerParams p = merge_params(plan, merges.as<int>(), told);
  const std::size_t box = flag_bytes + turn % kTurns * turn_bytes;
  for (std::size_t r = 0; r < peers.size(); ++r) {
    p.flags[r] = reinterpret_cast<unsigned*>(peers[r]);
    p.mailbox[r] = reinterpret_cast<float*>(peers[r] + box);
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
  check(cudaEventRecord(impl_->mailbox->pushed[impl_->turn % kTurns], static_cast<cudaStream_t>(stream)), "event");
}

const float* PeerExchange::merge(double seconds, void* stream) {
  const UseDevice use(impl_->gpu);
  for (const SharedMailbox& other : impl_->held) {
    if (other == impl_->mailbox) continue;  // this stream comes after it anyway
    check(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), other->pushed[impl_->turn % kTurns], 0), "event");
  }
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
