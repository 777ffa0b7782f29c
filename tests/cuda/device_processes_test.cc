// SPDX-License-Identifier: Apache-2.0
// Ranks that are processes, connected by TCP, on one GPU: states and pages by way of the host and through each other's
// memory (CUDA IPC).
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <cstdlib>

#include "cuda/gpu_processes.h"
#include "cuda/nccl_refusal.h"
#include "decode_loop.h"
#include "parallel/choose_link.h"
#include "parallel/page_window.h"
#include "parallel_checks.h"
#include "prefill_checks.h"
#include "tcp_ranks.h"
#include "treeattn/cuda.h"
#include "treeattn/error.h"

namespace treeattn {
namespace {

using testing::run_tcp_processes;
using testing_gpu::all_but_the_last_return;
using testing_gpu::kSkipped;
using testing_gpu::require;
using testing_parallel::Loop;

constexpr int kGpu = 0;
int on_gpu(int) { return kGpu; }

void require_none(const testing_parallel::Failures& failures) {
  for (const std::string& failure : failures) std::fprintf(stderr, "%s\n", failure.c_str());
  require(failures.empty(), "see above");
}

class Processes : public testing_gpu::Processes {};
INSTANTIATE_TEST_SUITE_P(Ranks, Processes, ::testing::Values(2, 3, 4), ::testing::PrintToStringParamName());

TEST_P(Processes, EveryLinkHasTheBitsOfOneRank) {
  const int ranks = GetParam();
  const std::vector<int> statuses = run_tcp_processes(ranks, [&](std::shared_ptr<Communicator> world) {
    const auto cases = testing_parallel::prepared_cases(53, static_cast<std::size_t>(ranks), kGpu);
    require(!cases.empty(), "no cases");
    world->barrier();
    for (const DeviceLink link : {DeviceLink::kHost, DeviceLink::kPeer}) {
      require_none(testing_parallel::check_strategies(world, cases, {}, on_gpu, link));
    }
  });
  EXPECT_EQ(statuses, std::vector<int>(static_cast<std::size_t>(ranks), 0));
}

// Kernels of processes that share a GPU would wait for each other in turns.
TEST_P(Processes, ShareAGpuAndGoByWayOfTheHost) {
  const int ranks = GetParam();
  const std::vector<int> statuses = run_tcp_processes(ranks, [&](std::shared_ptr<Communicator> world) {
    const kernels::cuda::RankDevice device(kGpu);
    require(parallel::fastest_link(*world, &device) == DeviceLink::kHost, "another link");
  });
  EXPECT_EQ(statuses, std::vector<int>(static_cast<std::size_t>(ranks), 0));
}

TEST_P(Processes, PromptsHaveTheBitsOfOneRank) {
  const int ranks = GetParam();
  const std::vector<int> statuses = run_tcp_processes(ranks, [&](std::shared_ptr<Communicator> world) {
    const std::vector<double> weights = testing_parallel::uneven_weights(ranks);
    for (const kernels::Case& shape : testing_parallel::prefill_cases()) {
      const testing_parallel::PreparedPrefill prefill(shape, kGpu);
      require(prefill.error() <= 1, shape.name);
      world->barrier();
      require_none(testing_parallel::check_prefill(world, prefill, {}, on_gpu));
      require_none(testing_parallel::check_prefill(world, prefill, weights, on_gpu));
    }
  });
  EXPECT_EQ(statuses, std::vector<int>(static_cast<std::size_t>(ranks), 0));
}

// Pages of odd sizes, some longer than a part of the window, some empty, a rank that gives nothing: everybody has all
// of them, call after call, and with a second window.
TEST_P(Processes, PagesOfAllRanksThroughAWindow) {
  const int ranks = GetParam();
  const std::vector<int> statuses = run_tcp_processes(ranks, [&](std::shared_ptr<Communicator> world) {
    const auto memory = parallel::memory_of(kGpu);
    const auto own = static_cast<std::size_t>(world->rank());
    const auto content = [](std::size_t rank, std::size_t call, std::size_t i) {
      return static_cast<std::byte>((i * 31 + i / 251 + rank * 101 + call * 7) % 256);
    };
    std::unique_ptr<parallel::PageWindow> window;
    for (std::size_t call = 0; call < 6; ++call) {
      if (call % 3 == 0) {
        window.reset();
        window = parallel::PageWindow::make(*world, memory);
        require(window != nullptr, "no window");
      }
      std::vector<std::vector<std::size_t>> sizes(static_cast<std::size_t>(ranks));
      std::vector<std::size_t> first(sizes.size() + 1, 0);
      for (std::size_t r = 0; r < sizes.size(); ++r) {
        const std::size_t long_page = parallel::PageWindow::kPartBytes + 4 * r + 1;
        if (r != call % sizes.size()) sizes[r] = {7, 1000003 * (r + 1), 0, long_page, 12345};
        first[r + 1] = first[r];
        for (const std::size_t size : sizes[r]) first[r + 1] += size;
      }
      std::byte* const all = memory->workspace(0, first.back())->data();
      std::vector<std::byte> mine(first[own + 1] - first[own]);
      for (std::size_t i = 0; i < mine.size(); ++i) mine[i] = content(own, call, i);
      memory->fill_zero(all, first.back());
      memory->copy_in(all + first[own], mine.data(), mine.size());
      std::vector<parallel::PageWindow::Pages> pages(sizes.size());
      for (std::size_t r = 0; r < sizes.size(); ++r) {
        std::size_t at = first[r];
        for (const std::size_t size : sizes[r]) pages[r].emplace_back(all + at, size), at += size;
      }
      const std::uint64_t sent = world->traffic().bytes;
      window->exchange(*world, pages);
      require(world->traffic().bytes - sent >= mine.size() * (sizes.size() - 1), "bytes not counted");
      std::vector<std::byte> got(first.back());
      memory->copy_out(got.data(), all, got.size());
      memory->finish();
      for (std::size_t r = 0; r < sizes.size(); ++r) {
        for (std::size_t i = 0; i < first[r + 1] - first[r]; ++i) {
          if (got[first[r] + i] == content(r, call, i)) continue;
          throw std::runtime_error("call " + std::to_string(call) + ", rank " + std::to_string(r) + ", byte " +
                                   std::to_string(i));
        }
      }
    }
  });
  EXPECT_EQ(statuses, std::vector<int>(static_cast<std::size_t>(ranks), 0));
}

// Who is killed between two prompts is named, and the survivors have the right bits afterwards.
TEST_P(Processes, SurvivorsReadPromptsAfterAKilledProcess) {
  const int ranks = GetParam();
  RankOptions options;
  options.deadline = Seconds(8.0);
  const std::vector<int> statuses = run_tcp_processes(
      ranks,
      [&](std::shared_ptr<Communicator> world) {
        const testing_parallel::PreparedPrefill prefill(testing_parallel::prefill_cases().front(), kGpu);
        world->barrier(Seconds(60));
        require_none(testing_parallel::check_prefill(world, prefill, {}, on_gpu));
        if (world->rank() == ranks - 1) ::raise(SIGKILL);
        try {
          testing_parallel::check_prefill(world, prefill, {}, on_gpu);
          require(false, "nobody was missed");
        } catch (const LostRanks& error) {
          require(error.ranks() == std::vector<int>{ranks - 1}, error.what());
        }
        world = world->shrink();
        require_none(testing_parallel::check_prefill(world, prefill, {}, on_gpu));
      },
      options);
  EXPECT_EQ(statuses, all_but_the_last_return(ranks));
}

// Ends this process where NCCL does not let ranks share a GPU, and says so.
void leave_where_nccl_refuses(const std::shared_ptr<Communicator>& world) {
  let_ranks_share_a_gpu();
  try {
    decode_over_nccl(world, kGpu);
  } catch (const Unavailable& error) {
    if (!nccl_refuses_to_share(error)) throw;
    std::printf("rank %d: %s\n", world->rank(), error.what());
    std::fflush(nullptr);
    ::_exit(kSkipped);
  }
}

bool nccl_refused(const std::vector<int>& statuses) {
  return std::find(statuses.begin(), statuses.end(), kSkipped) != statuses.end();
}

TEST_P(Processes, NcclHasTheBitsOfOneRank) {
  if (!nccl_available()) GTEST_SKIP() << "*** SKIPPED: this build has no NCCL ***";
  const int ranks = GetParam();
  const std::vector<int> statuses = run_tcp_processes(ranks, [&](std::shared_ptr<Communicator> world) {
    leave_where_nccl_refuses(world);
    const auto cases = testing_parallel::prepared_cases(53, static_cast<std::size_t>(ranks), kGpu);
    world->barrier();
    require_none(testing_parallel::check_strategies(world, cases, {}, on_gpu, DeviceLink::kNccl));
  });
  if (nccl_refused(statuses)) GTEST_SKIP() << "*** SKIPPED: NCCL refuses " << ranks << " ranks on one GPU ***";
  EXPECT_EQ(statuses, std::vector<int>(static_cast<std::size_t>(ranks), 0));
}

// A process is killed in the middle of a loop. The kernels of the others, which wait for its states, end; the loss is
// named, and the survivors go on with the same bits. Returns how the processes ended.
std::vector<int> lose_a_process(int ranks, DeviceLink link) {
  RankOptions options;
  options.deadline = Seconds(8.0);
  return run_tcp_processes(
      ranks,
      [&](std::shared_ptr<Communicator> world) {
        if (link == DeviceLink::kNccl) leave_where_nccl_refuses(world);
        const Loop loop;
        const auto want = loop.undisturbed(kGpu);
        world->barrier(Seconds(60));
        ThreadPool pool(1);
        KvCache cache(world, loop.config(), {}, kGpu);
        const ParallelOptions how{Strategy::kMerge, true, link};
        auto attention = std::make_unique<ParallelAttention>(world, how);
        const SequenceId id = cache.add_sequence();
        loop.append(cache, id, 0, Loop::kPrompt);
        int recovered = 0;
        for (std::int64_t step = 0; step < 30; ++step) {
          if (step == 10 && world->size() == ranks && world->rank() == ranks - 1) ::raise(SIGKILL);
          if (cache.length(id) == Loop::kPrompt + step) loop.append(cache, id, Loop::kPrompt + step, 1);
          try {
            const std::vector<float> out = loop.decode(*attention, cache, id, step, pool);
            const std::span<const float> expected = want[static_cast<std::size_t>(step)];
            require(testing_parallel::same_bits(std::span<const float>(out), expected), "other bits");
          } catch (const LostRanks& error) {
            require(error.ranks() == std::vector<int>{ranks - 1}, error.what());
            world = world->shrink();
            for (const TokenRange& range : cache.adopt(world)) loop.write(cache, range);
            attention = std::make_unique<ParallelAttention>(world, how);
            step = Loop::last_step(cache, id) - 1;
            ++recovered;
          }
        }
        require(recovered == 1, "nobody was missed");
      },
      options);
}

TEST_P(Processes, SurvivorsOfAKilledProcessGoOn) {
  EXPECT_EQ(lose_a_process(GetParam(), DeviceLink::kPeer), all_but_the_last_return(GetParam()));
}

TEST_P(Processes, SurvivorsOfAKilledProcessGoOnWithNccl) {
  if (!nccl_available()) GTEST_SKIP() << "*** SKIPPED: this build has no NCCL ***";
  const std::vector<int> statuses = lose_a_process(GetParam(), DeviceLink::kNccl);
  if (nccl_refused(statuses)) GTEST_SKIP() << "*** SKIPPED: NCCL refuses " << GetParam() << " ranks on one GPU ***";
  EXPECT_EQ(statuses, all_but_the_last_return(GetParam()));
}

}  // namespace
}  // namespace treeattn
