// SPDX-License-Identifier: Apache-2.0
// States that travel from GPU to GPU: by one kernel over peer memory and by NCCL, ranks being threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <limits>
#include <random>
#include <sstream>
#include <string>

#include "base/half.h"
#include "cuda/device_case.h"
#include "cuda/nccl_refusal.h"
#include "decode_loop.h"
#include "expect_on_ranks.h"
#include "kernels/cuda/ranks/common_mailbox.h"
#include "kernels/cuda/ranks/peer_exchange.h"
#include "merge/operator.h"
#include "merge/rows.h"
#include "parallel/choose_link.h"
#include "parallel_checks.h"
#include "treeattn/cuda.h"
#include "treeattn/error.h"

namespace treeattn {
namespace {

using testing_parallel::expect_on_ranks;
using testing_parallel::Failures;
using testing_parallel::Loop;

constexpr int kGpu = 0;
int on_gpu(int) { return kGpu; }

class Links : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (!cuda_problem().empty()) GTEST_SKIP() << "*** SKIPPED: " << cuda_problem() << " ***";
  }
};
class PeerLink : public Links {};
INSTANTIATE_TEST_SUITE_P(Ranks, PeerLink, testing::Values(1, 2, 3, 4, 8), testing::PrintToStringParamName());

TEST_P(PeerLink, HasTheBitsOfOneRank) {
  const auto cases = testing_parallel::prepared_cases(7, static_cast<std::size_t>(GetParam()) % 7, kGpu);
  expect_on_ranks(GetParam(), [&](const auto& world) {
    return testing_parallel::check_strategies(world, cases, {}, on_gpu, DeviceLink::kPeer);
  });
}

TEST_P(PeerLink, WithUnequalShares) {
  const auto cases = testing_parallel::prepared_cases(19, 2, kGpu);
  const std::vector<double> weights = testing_parallel::uneven_weights(GetParam());
  expect_on_ranks(GetParam(), [&](const auto& world) {
    return testing_parallel::check_strategies(world, cases, weights, on_gpu, DeviceLink::kPeer);
  });
}

// Many steps through the same mailboxes, and new ones when the shares change.
TEST_P(PeerLink, DecodeLoopThroughRebalance) {
  const int ranks = GetParam();
  const Loop loop;
  const auto want = loop.undisturbed(kGpu);
  std::atomic<int> wrong = 0;
  run_ranks(ranks, [&](std::shared_ptr<Communicator> world) {
    ThreadPool pool(1);
    KvCache cache(world, loop.config(), {}, kGpu);
    ParallelAttention attention(world, {Strategy::kMerge, true, DeviceLink::kPeer});
    const SequenceId id = cache.add_sequence();
    loop.append(cache, id, 0, Loop::kPrompt);
    for (std::int64_t step = 0; step < Loop::kSteps; ++step) {
      if (step % 20 == 15) cache.rebalance(step < 20 ? testing_parallel::uneven_weights(ranks) : std::vector<double>{});
      loop.append(cache, id, Loop::kPrompt + step, 1);
      const std::vector<float> out = loop.decode(attention, cache, id, step, pool);
      const std::span<const float> expected = want[static_cast<std::size_t>(step)];
      if (!testing_parallel::same_bits(std::span<const float>(out), expected)) ++wrong;
    }
  });
  EXPECT_EQ(wrong, 0);
}

// The same steps with queries and results on the GPU, all of them put on the streams before the host looks at one.
TEST_P(PeerLink, DecodeLoopOnTheDevice) {
  const Loop loop;
  const auto want = loop.undisturbed(kGpu);
  constexpr std::int64_t kRow = Loop::kHeads * Loop::kDim;
  std::atomic<int> wrong = 0, refused = 0;
  run_ranks(GetParam(), [&](std::shared_ptr<Communicator> world) {
    ThreadPool pool(1);
    KvCache cache(world, loop.config(), {}, kGpu);
    ParallelAttention attention(world, {Strategy::kMerge, true, DeviceLink::kPeer});
    ParallelAttention by_host(world, {Strategy::kMerge, true, DeviceLink::kHost});
    const SequenceId id = cache.add_sequence();
    loop.append(cache, id, 0, Loop::kPrompt);
    std::vector<float> found(loop.q.size());
    const kernels::DeviceMemory q(loop.q.data(), loop.q.size() * sizeof(float)), out(found.size() * sizeof(float));
    kernels::cuda_check(cudaDeviceSynchronize(), "copy");
    cudaStream_t stream = nullptr;
    kernels::cuda_check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    AttentionOptions options;
    options.causal = true;
    for (std::int64_t step = 0; step < Loop::kSteps; ++step) {
      loop.append(cache, id, Loop::kPrompt + step, 1);
      const QueryView view =
          QueryView::dense(q.as<float>() + step * kRow, DType::kFloat32, 1, 1, Loop::kHeads, Loop::kDim);
      const auto decode = [&](ParallelAttention& by) {
        return by.decode_on_device(cache, 0, {&id, 1}, view, options, out.as<float>() + step * kRow, stream, pool);
      };
      if (!decode(by_host)) ++refused;
      if (!decode(attention)) ++wrong;
    }
    kernels::cuda_check(
        cudaMemcpyAsync(found.data(), out.as<float>(), found.size() * sizeof(float), cudaMemcpyDeviceToHost, stream),
        "copy");
    kernels::cuda_check(cudaStreamSynchronize(stream), "steps");
    cudaStreamDestroy(stream);
    for (std::int64_t step = 0; step < Loop::kSteps; ++step) {
      const std::span<const float> expected = want[static_cast<std::size_t>(step)];
      if (!testing_parallel::same_bits(
              std::span<const float>(found).subspan(static_cast<std::size_t>(step * kRow), kRow), expected)) {
        ++wrong;
      }
    }
  });
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(refused, GetParam() * Loop::kSteps);
}

// Threads with one GPU have one mailbox, so that nothing has to travel.
TEST_P(PeerLink, IsTheFastestOfThreads) {
  run_ranks(GetParam(), [&](std::shared_ptr<Communicator> world) {
    const kernels::cuda::RankDevice device(kGpu);
    const DeviceLink want = world->size() == 1 ? DeviceLink::kHost : DeviceLink::kPeer;
    EXPECT_EQ(parallel::fastest_link(*world, &device), want);
    if (world->size() == 1) return;
    EXPECT_EQ(parallel::fastest_link(*world, world->rank() == 0 ? nullptr : &device), DeviceLink::kHost);
  });
}

class OneLink : public Links {};
INSTANTIATE_TEST_SUITE_P(One, OneLink, testing::Values(1), testing::PrintToStringParamName());

using kernels::cuda::ExchangePlan;

// Ranks with one, no and two blocks; and more rows than there are warps, with more blocks than shared memory takes.
std::vector<ExchangePlan> plans_of_three() {
  ExchangePlan large{{0, 10, 10, 24}, {}, 300, 130, 0};
  for (int block = 1; block < 24; ++block) large.merges.emplace_back(0, block);
  return {{{0, 1, 1, 3}, {{1, 2}, {0, 1}}, 37, 66, 0}, large};
}

// Three ranks on one GPU, turn after turn: random states on the GPU, and what the operator makes of them.
class ThreeRanks {
 public:
  static constexpr std::size_t kRanks = 3, kTurns = 40;
  const ExchangePlan plan;

  explicit ThreeRanks(ExchangePlan of) : plan(std::move(of)) {
    for (cudaStream_t& stream : streams_) {
      kernels::cuda_check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    }
  }
  ~ThreeRanks() {
    for (cudaStream_t& stream : streams_) cudaStreamDestroy(stream);
  }
  ThreeRanks(const ThreeRanks&) = delete;
  ThreeRanks& operator=(const ThreeRanks&) = delete;

  cudaStream_t stream(std::size_t rank) const { return streams_[rank]; }

  // New states, a rank's to where `place` says.
  void begin_turn(const std::function<float*(std::size_t)>& place) {
    const auto count = static_cast<std::size_t>(plan.first_block.back());
    blocks_.resize(count * plan.block_floats());
    for (float& value : blocks_) value = normal_(random_);
    for (std::size_t row = 0; row < count * plan.rows; ++row) {
      if (random_() % 5 == 0) blocks_[row * plan.row_floats] = -std::numeric_limits<float>::infinity();
    }
    for (std::size_t r = 0; r < kRanks; ++r) {
      const auto first = static_cast<std::size_t>(plan.first_block[r]),
                 last = static_cast<std::size_t>(plan.first_block[r + 1]);
      kernels::cuda_check(cudaMemcpy(place(r), blocks_.data() + first * plan.block_floats(),
                                     (last - first) * plan.block_floats() * sizeof(float), cudaMemcpyHostToDevice),
                          "copy");
    }
    kernels::cuda_check(cudaDeviceSynchronize(), "copy");  // the streams do not wait for it
    for (const auto& [lower, higher] : plan.merges) {
      merge::merge_rows(blocks_.data() + static_cast<std::size_t>(lower) * plan.block_floats(),
                        blocks_.data() + static_cast<std::size_t>(higher) * plan.block_floats(), plan.rows,
                        plan.row_floats);
    }
  }
  bool is_root(const float* found) const {
    return testing_parallel::same_bits(std::span(found, plan.block_floats()),
                                       std::span<const float>(blocks_).first(plan.block_floats()));
  }
  // What the root comes to.
  std::vector<float> finished() const {
    const std::size_t columns = plan.row_floats - 2;
    std::vector<float> out(plan.rows * columns);
    for (std::size_t row = 0; row < plan.rows; ++row) {
      merge::finalize_row(blocks_.data() + row * plan.row_floats, columns, out.data() + row * columns);
    }
    return out;
  }
  // Another one every time.
  std::vector<std::size_t> some_order() {
    std::vector<std::size_t> ranks = {0, 1, 2};
    std::shuffle(ranks.begin(), ranks.end(), random_);
    return ranks;
  }

 private:
  cudaStream_t streams_[kRanks] = {};
  std::mt19937 random_{5};
  std::normal_distribution<float> normal_;
  std::vector<float> blocks_;
};

using kernels::cuda::PeerExchange;

std::vector<std::unique_ptr<PeerExchange>> connected_exchanges(const ExchangePlan& plan) {
  std::vector<std::unique_ptr<PeerExchange>> exchanges;
  std::vector<kernels::cuda::LentMemory::Address> all;
  for (std::size_t r = 0; r < ThreeRanks::kRanks; ++r) {
    exchanges.push_back(std::make_unique<PeerExchange>(kGpu, static_cast<int>(r), plan));
    all.push_back(exchanges.back()->mailbox().address());
  }
  for (const auto& exchange : exchanges) exchange->mailbox().connect(all);
  return exchanges;
}

// halves: push and merge as kernels of their own, the merge behind everybody's push.
void expect_exchange(const ExchangePlan& plan, bool halves) {
  ThreeRanks ranks(plan);
  const auto exchanges = connected_exchanges(ranks.plan);
  for (std::size_t turn = 0; turn < ThreeRanks::kTurns; ++turn) {
    ranks.begin_turn([&](std::size_t r) { return exchanges[r]->own(); });
    for (const std::size_t r : ranks.some_order()) {
      if (halves) {
        exchanges[r]->push(ranks.stream(r));
      } else {
        exchanges[r]->exchange(20.0, {}, ranks.stream(r));
      }
    }
    for (const std::size_t r : ranks.some_order()) {
      if (halves) exchanges[r]->merge(20.0, {}, ranks.stream(r));
    }
    for (std::size_t r = 0; r < ThreeRanks::kRanks; ++r) {
      kernels::cuda_check(cudaStreamSynchronize(ranks.stream(r)), "exchange");
      ASSERT_TRUE(exchanges[r]->missing().empty());
      ASSERT_TRUE(ranks.is_root(exchanges[r]->root())) << "rank " << r << ", turn " << turn;
    }
  }
}

TEST_P(OneLink, OneKernelEach) {
  for (const ExchangePlan& plan : plans_of_three()) expect_exchange(plan, false);
}

TEST_P(OneLink, TwoKernelsEach) {
  for (const ExchangePlan& plan : plans_of_three()) expect_exchange(plan, true);
}

// Recorded once, repeated with other states every time, and what they come to left on the GPU.
void expect_repeated_exchange(const ExchangePlan& plan) {
  ThreeRanks ranks(plan);
  const auto exchanges = connected_exchanges(ranks.plan);
  const std::size_t count = ranks.plan.rows * (ranks.plan.row_floats - 2);
  std::vector<std::unique_ptr<kernels::DeviceMemory>> values, rounded;
  std::vector<cudaGraphExec_t> graphs(ThreeRanks::kRanks);
  for (std::size_t r = 0; r < ThreeRanks::kRanks; ++r) {
    values.push_back(std::make_unique<kernels::DeviceMemory>(count * sizeof(float)));
    rounded.push_back(std::make_unique<kernels::DeviceMemory>(count * sizeof(std::uint16_t)));
    cudaGraph_t graph = nullptr;
    kernels::cuda_check(cudaStreamBeginCapture(ranks.stream(r), cudaStreamCaptureModeThreadLocal), "recording");
    exchanges[r]->exchange(20.0, {values[r]->as<float>(), rounded[r]->as<std::uint16_t>()}, ranks.stream(r));
    kernels::cuda_check(cudaStreamEndCapture(ranks.stream(r), &graph), "recording");
    kernels::cuda_check(cudaGraphInstantiate(&graphs[r], graph, 0), "recording");
    cudaGraphDestroy(graph);
  }
  std::vector<float> found(count);
  std::vector<std::uint16_t> found_rounded(count);
  for (std::size_t turn = 0; turn < ThreeRanks::kTurns; ++turn) {
    ranks.begin_turn([&](std::size_t r) { return exchanges[r]->own(); });
    for (const std::size_t r : ranks.some_order()) {
      kernels::cuda_check(cudaGraphLaunch(graphs[r], ranks.stream(r)), "recorded exchange");
    }
    const std::vector<float> want = ranks.finished();
    for (std::size_t r = 0; r < ThreeRanks::kRanks; ++r) {
      kernels::cuda_check(cudaStreamSynchronize(ranks.stream(r)), "exchange");
      ASSERT_TRUE(exchanges[r]->missing().empty());
      kernels::cuda_check(
          cudaMemcpy(found.data(), values[r]->as<float>(), count * sizeof(float), cudaMemcpyDeviceToHost), "copy");
      kernels::cuda_check(cudaMemcpy(found_rounded.data(), rounded[r]->as<std::uint16_t>(),
                                     count * sizeof(std::uint16_t), cudaMemcpyDeviceToHost),
                          "copy");
      ASSERT_TRUE(testing_parallel::same_bits(std::span<const float>(found), std::span<const float>(want)))
          << "rank " << r << ", turn " << turn;
      for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(found_rounded[i], base::float_to_bfloat16(want[i]));
    }
  }
  for (cudaGraphExec_t graph : graphs) cudaGraphExecDestroy(graph);
}

TEST_P(OneLink, RecordedAndRepeated) {
  for (const ExchangePlan& plan : plans_of_three()) expect_repeated_exchange(plan);
}

void expect_one_mailbox(const ExchangePlan& plan) {
  ThreeRanks ranks(plan);
  kernels::cuda::CommonMailbox mailbox(kGpu, plan);
  for (std::size_t turn = 1; turn <= ThreeRanks::kTurns; ++turn) {
    ranks.begin_turn([&](std::size_t r) { return mailbox.place(static_cast<int>(r)); });
    for (const std::size_t r : ranks.some_order()) {
      ASSERT_EQ(mailbox.arrive(ranks.stream(r)), turn);
    }
    ASSERT_TRUE(ranks.is_root(mailbox.wait(turn, ranks.stream(0)))) << "turn " << turn;
  }
}

TEST_P(OneLink, OneMailboxForAll) {
  for (const ExchangePlan& plan : plans_of_three()) expect_one_mailbox(plan);
}

// A kernel that waits for a rank which never comes ends by itself and says which; it does not trap. What comes behind
// it does not wait again.
TEST_P(OneLink, WaitingForALostRankEnds) {
  using kernels::cuda::LentMemory;
  const ExchangePlan plan{{0, 1, 2, 3}, {{0, 1}, {0, 2}}, 5, 18, 0};
  PeerExchange here(kGpu, 0, plan), there(kGpu, 1, plan), silent(kGpu, 2, plan);
  const std::vector<LentMemory::Address> all = {here.mailbox().address(), there.mailbox().address(),
                                                silent.mailbox().address()};
  EXPECT_TRUE(LentMemory::share_a_gpu(all));
  here.mailbox().connect(all);
  there.mailbox().connect(all);
  cudaStream_t streams[2] = {};
  for (cudaStream_t& stream : streams) {
    kernels::cuda_check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  }
  for (const double seconds : {0.3, 3600.0, 3600.0}) {
    here.exchange(seconds, {}, streams[0]);
    there.exchange(seconds, {}, streams[1]);
  }
  for (cudaStream_t& stream : streams) {
    kernels::cuda_check(cudaStreamSynchronize(stream), "the kernel must end without an error");
    cudaStreamDestroy(stream);
  }
  EXPECT_EQ(here.missing(), std::vector<int>{2});
  EXPECT_EQ(there.missing(), std::vector<int>{2});
}

TEST_P(OneLink, IsRefusedWhereARankHasNoGpu) {
  const Loop loop;
  for (const DeviceLink link : {DeviceLink::kPeer, DeviceLink::kNccl}) {
    std::atomic<int> refused = 0;
    run_ranks(2, [&](std::shared_ptr<Communicator> world) {
      ThreadPool pool(1);
      KvCache cache(world, loop.config(), {}, world->rank() == 0 ? kGpu : KvCache::kHost);
      ParallelAttention attention(world, {Strategy::kMerge, false, link});
      const SequenceId id = cache.add_sequence();
      loop.append(cache, id, 0, Loop::kPrompt);
      try {
        loop.decode(attention, cache, id, 0, pool);
      } catch (const InvalidArgument&) {
        ++refused;
      }
    });
    EXPECT_EQ(refused, 2);
  }
}

// Rank 1 leaves in the middle of a loop: it is named on all others, which go on without it.
void expect_survivors_go_on(int ranks, DeviceLink link) {
  const Loop loop;
  const auto want = loop.undisturbed(kGpu);
  std::atomic<int> wrong = 0, recovered = 0;
  RankOptions options;
  options.deadline = Seconds(4.0);
  run_ranks(
      ranks,
      [&](std::shared_ptr<Communicator> world) {
        ThreadPool pool(1);
        KvCache cache(world, loop.config(), {}, kGpu);
        const ParallelOptions how{Strategy::kMerge, true, link};
        auto attention = std::make_unique<ParallelAttention>(world, how);
        const SequenceId id = cache.add_sequence();
        loop.append(cache, id, 0, Loop::kPrompt);
        for (std::int64_t step = 0; step < Loop::kSteps; ++step) {
          if (step == 20 && world->size() == ranks && world->rank() == 1) return;
          if (cache.length(id) == Loop::kPrompt + step) loop.append(cache, id, Loop::kPrompt + step, 1);
          try {
            const std::vector<float> out = loop.decode(*attention, cache, id, step, pool);
            const std::span<const float> expected = want[static_cast<std::size_t>(step)];
            if (!testing_parallel::same_bits(std::span<const float>(out), expected)) ++wrong;
          } catch (const LostRanks& error) {
            if (error.ranks() != std::vector<int>{1}) ++wrong;
            world = world->shrink();
            for (const TokenRange& range : cache.adopt(world)) loop.write(cache, range);
            attention = std::make_unique<ParallelAttention>(world, how);
            step = Loop::last_step(cache, id) - 1;
            ++recovered;
          }
        }
      },
      options);
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(recovered, ranks - 1);
}

TEST_P(OneLink, SurvivorsOfALostRankGoOn) { expect_survivors_go_on(3, DeviceLink::kPeer); }

class NcclLink : public Links {
 protected:
  void SetUp() override {
    Links::SetUp();
    if (IsSkipped()) return;
    if (!nccl_available()) GTEST_SKIP() << "*** SKIPPED: this build has no NCCL ***";
    let_ranks_share_a_gpu();
    if (GetParam() > 1) skip_where_ranks_cannot_share_a_gpu();
  }

  void skip_where_ranks_cannot_share_a_gpu() {
    NcclProblem problem;
    run_ranks(GetParam(), [&](std::shared_ptr<Communicator> world) {
      try {
        decode_over_nccl(world, kGpu);
      } catch (const Unavailable& error) {
        problem.add(error);
      }
    });
    ASSERT_EQ(problem.failure(), "");
    if (problem.refusal().empty()) return;
    GTEST_SKIP() << "*** SKIPPED: " << GetParam() << " ranks on one GPU over NCCL: " << problem.refusal() << " ***";
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, NcclLink, testing::Values(1, 2, 3, 4, 8), testing::PrintToStringParamName());

TEST_P(NcclLink, EveryStrategyOnTheCaseList) {
  const auto cases = testing_parallel::prepared_cases(11, static_cast<std::size_t>(GetParam()), kGpu);
  expect_on_ranks(GetParam(), [&](const auto& world) {
    return testing_parallel::check_strategies(world, cases, {}, on_gpu, DeviceLink::kNccl);
  });
}

TEST_P(NcclLink, WithUnequalShares) {
  const auto cases = testing_parallel::prepared_cases(37, 4, kGpu);
  const std::vector<double> weights = testing_parallel::uneven_weights(GetParam());
  expect_on_ranks(GetParam(), [&](const auto& world) {
    return testing_parallel::check_strategies(world, cases, weights, on_gpu, DeviceLink::kNccl);
  });
}

class NcclLinkOfSeveral : public NcclLink {};
INSTANTIATE_TEST_SUITE_P(Ranks, NcclLinkOfSeveral, testing::Values(2, 3, 4), testing::PrintToStringParamName());

TEST_P(NcclLinkOfSeveral, SurvivorsOfALostRankGoOn) { expect_survivors_go_on(GetParam(), DeviceLink::kNccl); }

// What messages of the host take says nothing about NCCL: not even the model is asked.
TEST_P(NcclLinkOfSeveral, AutoTriesOutEveryStrategyOverNccl) {
  const Loop loop;
  expect_on_ranks(GetParam(), [&](const std::shared_ptr<Communicator>& world) {
    ThreadPool pool(1);
    KvCache cache(world, loop.config(), {}, kGpu);
    ParallelAttention attention(world, {Strategy::kAuto, true, DeviceLink::kNccl});
    const SequenceId id = cache.add_sequence();
    loop.append(cache, id, 0, Loop::kPrompt + 1);
    loop.decode(attention, cache, id, 0, pool);
    testing_parallel::Failures failures;
    if (attention.why().find("inside a node") != std::string::npos) failures.push_back("measured the host's links");
    std::istringstream lines(attention.why());
    int tried = 0;
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line);
      std::string strategy, steps, bytes, model, measured;
      words >> strategy >> steps >> bytes >> model >> measured;
      if (model == "-" && measured != "-") ++tried;
    }
    if (tried != 4) failures.push_back(attention.why());
    return failures;
  });
}

}  // namespace
}  // namespace treeattn
