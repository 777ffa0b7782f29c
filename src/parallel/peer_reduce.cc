// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "kernels/cuda/ranks/common_mailbox.h"
#include "kernels/cuda/ranks/peer_exchange.h"
#include "parallel/agree.h"
#include "parallel/device_reduce.h"
#include "parallel/lend.h"
#include "treeattn/error.h"

namespace treeattn::parallel {
namespace {

using kernels::cuda::CommonMailbox;
using kernels::cuda::ExchangePlan;
using kernels::cuda::FinishedRows;
using kernels::cuda::PeerExchange;

// The blocks of all ranks, and the merges of the canonical tree over them.
ExchangePlan plan_of(const plan::Shares& shares, StateShape shape) {
  ExchangePlan out;
  out.rows = shape.rows;
  out.row_floats = shape.row_floats;
  struct Block {
    plan::TreeNode node;
    int number;
  };
  std::vector<Block> blocks;
  for (int rank = 0; rank < shares.ranks(); ++rank) {
    out.first_block.push_back(static_cast<int>(blocks.size()));
    for (const plan::TreeNode& node : shares.nodes_of(rank)) blocks.push_back({node, static_cast<int>(blocks.size())});
  }
  out.first_block.push_back(static_cast<int>(blocks.size()));
  std::ranges::sort(blocks, {}, [](const Block& block) { return block.node.first_leaf(); });
  plan::NodeSet nodes;
  std::vector<int> numbers;  // of the nodes
  for (const Block& block : blocks) {
    numbers.push_back(block.number);
    plan::append_node(nodes, block.node, [&] {
      const int higher = numbers.back();
      numbers.pop_back();
      out.merges.emplace_back(numbers.back(), higher);
    });
  }
  out.root = numbers.front();
  return out;
}

std::int64_t new_recording() {
  static std::atomic<std::int64_t> last = 0;
  return ++last;
}

class PeerReducer final : public DeviceReducer {
 public:
  float* place(const ReduceContext& context, StateShape shape, kernels::cuda::RankDevice& device) override {
    Communicator& comm = context.communicator;
    ExchangePlan wanted = plan_of(context.shares, shape);
    if (plan() == nullptr || *plan() != wanted) make(comm, device, std::move(wanted));
    return common_ ? common_->place(comm.rank()) : exchange_->own();
  }

  void reduce(Strategy, const plan::Schedule&, const ReduceContext& context, StateShape shape, float* /*own*/,
              kernels::cuda::RankDevice& device, float* root) override {
    Communicator& comm = context.communicator;
    if (common_) {
      const std::uint64_t turn = common_->arrive(device.stream());
      comm.barrier();  // of the threads, while the GPU is at work
      std::copy_n(common_->wait(turn, device.stream()), shape.block_floats(), root);
      return;
    }
    exchange(comm, {}, device.stream());
    count_sent(comm);
    device.finish();
    confirm(comm);
    std::copy_n(exchange_->root(), shape.block_floats(), root);
  }

  void reduce_on_gpu(const ReduceContext& context, StateShape shape, kernels::cuda::RankDevice& device,
                     FinishedRows out, void* stream) override {
    Communicator& comm = context.communicator;
    if (!common_) return exchange(comm, out, stream);
    common_->arrive(stream);
    comm.barrier();
    device.finalize(common_->follow(stream), shape.rows, static_cast<std::int64_t>(shape.row_floats) - 2, out.values);
  }

  std::int64_t recording() const override { return common_ || together_ ? 0 : recording_; }

  // Threads with one mailbox send nothing. Elsewhere a float goes with its turn.
  void count_sent(Communicator& comm) const override {
    if (common_) return;
    comm.count_step();
    const ExchangePlan& plan = exchange_->plan();
    const auto rank = static_cast<std::size_t>(comm.rank());
    const auto blocks = static_cast<std::size_t>(plan.first_block[rank + 1] - plan.first_block[rank]);
    for (int other = 0; other < comm.size(); ++other) {
      if (other != comm.rank()) comm.count_sent(other, blocks * plan.block_floats() * sizeof(kernels::cuda::PeerWord));
    }
  }

  void confirm(Communicator& comm) override {
    const std::vector<int> missing = exchange_ ? exchange_->missing() : std::vector<int>{};
    if (missing.empty()) return;
    exchange_.reset();
    comm.barrier();  // says who is lost, the same on all survivors
    throw Error(fmt::format("exchange between GPUs: nothing came from ranks {} within {:.1f} s, though all are there",
                            fmt::join(missing, ", "), seconds_to_wait(comm)));
  }

 private:
  static double seconds_to_wait(const Communicator& comm) { return kShareOfDeadline * comm.deadline().count(); }

  void exchange(Communicator& comm, FinishedRows out, void* stream) {
    if (!together_) {
      if (threads_ && !PeerExchange::is_recorded(stream)) comm.barrier();
      return exchange_->exchange(seconds_to_wait(comm), out, stream);
    }
    exchange_->push(stream);
    comm.barrier();  // of the threads, while the GPU is at work
    exchange_->merge(seconds_to_wait(comm), out, stream);
  }

  const ExchangePlan* plan() const { return common_ ? &common_->plan() : exchange_ ? &exchange_->plan() : nullptr; }

  // Collective.
  void make(Communicator& comm, kernels::cuda::RankDevice& device, ExchangePlan plan) {
    device.finish();
    if (share_one_gpu(comm, device.gpu())) {
      make_common(comm, device.gpu(), std::move(plan));
    } else {
      make_exchange(comm, device, std::move(plan));
    }
  }

  // Collective. Rank 0's, which the others hold as well: it goes with the last of them.
  void make_common(Communicator& comm, int gpu, ExchangePlan plan) {
    using Shared = std::shared_ptr<CommonMailbox>;
    common_.reset();
    auto* lent = new Shared;  // it stays when ranks are lost meanwhile: someone may be about to look at it
    std::string failure;
    if (comm.rank() == 0) failure = failure_of([&] { *lent = std::make_shared<CommonMailbox>(gpu, std::move(plan)); });
    require_reached(comm, failure);
    common_ = *gathered(comm, lent).front();
    comm.barrier();
    delete lent;
  }

  // Collective.
  void make_exchange(Communicator& comm, kernels::cuda::RankDevice& device, ExchangePlan plan) {
    if (exchange_) {
      free_together(comm, exchange_->mailbox());
      exchange_.reset();
    }
    std::unique_ptr<PeerExchange> fresh;
    const std::string failure =
        failure_of([&] { fresh = std::make_unique<PeerExchange>(device.gpu(), comm.rank(), std::move(plan)); });
    together_ = connect_together(comm, fresh ? &fresh->mailbox() : nullptr, failure);
    exchange_ = std::move(fresh);
    threads_ = share_a_process(comm);
    recording_ = new_recording();
  }

  std::shared_ptr<CommonMailbox> common_;   // where all ranks are threads with one GPU
  std::unique_ptr<PeerExchange> exchange_;  // elsewhere
  bool together_ = false;                   // ranks of one process share a GPU
  bool threads_ = false;                    // there are ranks of one process
  std::int64_t recording_ = 0;              // of the exchange: another lies elsewhere
};

}  // namespace

std::unique_ptr<DeviceReducer> peer_reducer() { return std::make_unique<PeerReducer>(); }

}  // namespace treeattn::parallel
