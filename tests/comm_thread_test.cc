// SPDX-License-Identifier: Apache-2.0
// Ranks that are threads: the list of cases at several sizes, nodes, cores, and what a rank that ends does to others.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "base/machine.h"
#include "comm/far_memory.h"
#include "comm/thread_transport.h"
#include "comm_cases.h"

namespace treeattn {
namespace {

using testing::comm_cases;
using World = std::shared_ptr<Communicator>;

constexpr int kCommSizes[] = {1, 2, 3, 4, 5, 7, 8, 16};

class CommCases : public ::testing::TestWithParam<std::tuple<int, std::size_t>> {};

TEST_P(CommCases, OnThreads) {
  const auto& [ranks, index] = GetParam();
  run_ranks(ranks, [&, i = index](const World& world) {
    EXPECT_EQ(world->transport(), "threads");
    comm_cases()[i].run(*world);
    world->barrier();
  });
}

INSTANTIATE_TEST_SUITE_P(Sizes, CommCases,
                         ::testing::Combine(::testing::ValuesIn(kCommSizes),
                                            ::testing::Range(std::size_t{0}, comm_cases().size())),
                         [](const auto& test) {
                           return comm_cases()[std::get<1>(test.param)].name + std::to_string(std::get<0>(test.param));
                         });

TEST(CommThreads, BarrierWaitsForAll) {
  std::atomic<int> arrived{0};
  run_ranks(5, [&](const World& world) {
    for (int round = 1; round <= 20; ++round) {
      if (world->rank() == round % 5) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      arrived.fetch_add(1);
      world->barrier();
      EXPECT_GE(arrived.load(), 5 * round);
    }
  });
}

TEST(CommThreads, CountsWhatCrossesNodes) {
  RankOptions options;
  options.nodes = {4, 4, 2, 2, 2};
  std::array<std::atomic<std::uint64_t>, 2> remote{};
  run_ranks(
      5,
      [&](const World& world) {
        EXPECT_EQ(world->nodes(), 2);
        EXPECT_EQ(world->node_of(0), 0);
        EXPECT_EQ(world->node_of(4), 1);
        EXPECT_THROW(world->node_of(5), InvalidArgument);
        std::vector<std::uint64_t> values(10);
        world->allreduce(testing::bytes_of(values), 8, testing::chain);
        remote[0] += world->traffic().remote_messages;
        remote[1] += world->traffic().remote_bytes;
        const auto local = world->split(world->node_of(world->rank()), 0);
        EXPECT_EQ(local->nodes(), 1);
        EXPECT_EQ(local->node_of(0), 0);
      },
      options);
  // The tree's edges 0-1, 2-3, 0-2, 0-4: the last two cross, up and down.
  EXPECT_EQ(remote[0], 4u);
  EXPECT_EQ(remote[1], 4u * 80u);
}

TEST(CommThreads, NodesFromTheEnvironment) {
  ::setenv("TREEATTN_NODES", "1,0,1", 1);
  run_ranks(3, [&](const World& world) {
    EXPECT_EQ(world->nodes(), 2);
    EXPECT_EQ(world->node_of(1), 1);
    EXPECT_EQ(world->node_of(2), 0);
  });
  EXPECT_THROW(run_ranks(2, [](const World&) {}), InvalidArgument);
  ::unsetenv("TREEATTN_NODES");
  RankOptions options;
  options.nodes = {0, 1};
  EXPECT_THROW(run_ranks(
                   3, [](const World&) {}, options),
               InvalidArgument);
  EXPECT_THROW(run_ranks(0, [](const World&) {}), InvalidArgument);
  EXPECT_THROW(run_ranks(1000000, [](const World&) {}), InvalidArgument);
  EXPECT_THROW(run_ranks(2, nullptr), InvalidArgument);
  EXPECT_THROW(Communicator(std::shared_ptr<comm::Transport>()), InvalidArgument);
}

TEST(CommThreads, PinsEvenly) {
  const std::size_t cores = base::usable_processors().size();
  if (cores == 0) GTEST_SKIP() << "no affinity masks here";
  for (const int ranks : {1, 2, static_cast<int>(2 * cores + 1)}) {
    std::mutex mutex;
    std::vector<int> used;
    run_ranks(ranks, [&](const World&) {
      const std::lock_guard lock(mutex);
      for (const int processor : base::usable_processors()) used.push_back(processor);
    });
    const std::size_t expected = std::max(cores, static_cast<std::size_t>(ranks));
    EXPECT_EQ(used.size(), expected);
    for (const int processor : base::usable_processors()) {
      EXPECT_GE(std::count(used.begin(), used.end(), processor), static_cast<std::ptrdiff_t>(expected / cores));
    }
  }
}

TEST(CommThreads, ThrowsWhatARankThrew) {
  EXPECT_THROW(run_ranks(3,
                         [](const World& world) {
                           if (world->rank() == 2) throw std::domain_error("mine");
                           world->barrier();
                         }),
               std::domain_error);
  EXPECT_THROW(run_ranks(3,
                         [](const World& world) {
                           if (world->rank() != 2) world->barrier();
                         }),
               LostRanks);
}

// A rank that has done its part and returned is missed only by those who still want something of it.
TEST(CommThreads, MayReturnEarly) {
  run_ranks(6, [](const World& world) {
    const auto half = world->split(world->rank() / 3, 0);
    world->barrier();
    if (world->rank() >= 3) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    for (const auto& one : comm_cases()) one.run(*half);
  });
}

// A GPU's memory, played by memory whose bytes only its own copy knows how to read: it holds them inverted.
struct Inverted {
  static constexpr std::size_t kBytes = 1 << 17, kRefused = 13;
  static inline std::vector<std::byte> memory = std::vector<std::byte>(2 * kBytes);
  static inline thread_local int under_way = 0;
  static inline std::atomic<int> copies = 0;

  static bool has(const void* address) {
    const auto* at = static_cast<const std::byte*>(address);
    return at >= memory.data() && at < memory.data() + memory.size();
  }
  static void start(void* to, const void* from, std::size_t bytes) {
    if (bytes == kRefused) throw Error("refused");
    ++under_way;
    std::memcpy(to, from, bytes);
    if (has(to) == has(from)) return;
    for (std::size_t i = 0; i < bytes; ++i) static_cast<std::byte*>(to)[i] = ~static_cast<std::byte*>(to)[i];
  }
  static void finish() { copies += std::exchange(under_way, 0); }
  static constexpr comm::FarMemory::Copier kCopier{start, finish};
};

TEST(CommThreads, MessagesMayLieInMemoryOfAGpu) {
  const comm::FarMemory far(Inverted::memory.data(), Inverted::memory.size(), Inverted::kCopier);
  for (const std::size_t bytes : {std::size_t{100}, Inverted::kBytes}) {
    Inverted::copies = 0;
    const std::vector<std::byte> sent(bytes, std::byte{5});
    std::vector<std::byte> came(bytes);
    run_ranks(2, [&](const World& world) {
      const std::span<std::byte> there(Inverted::memory.data() + (world->rank() == 0 ? 0 : Inverted::kBytes), bytes);
      const auto send = [&](std::span<const std::byte> data) {
        Request request = world->send(1 - world->rank(), data);
        world->wait(request);
      };
      const auto receive = [&](std::span<std::byte> data) {
        Request request = world->receive(1 - world->rank(), data);
        world->wait(request);
      };
      if (world->rank() == 0) {
        send(sent);
        receive(there);
        send(there);
      } else {
        receive(there);
        send(there);
        receive(came);
      }
    });
    EXPECT_EQ(came, sent);
    EXPECT_EQ(Inverted::memory[0], ~std::byte{5});
    EXPECT_EQ(Inverted::copies, 3) << bytes;
  }
}

TEST(CommThreads, ACopyThatFailsIsTheReceiversError) {
  const comm::FarMemory far(Inverted::memory.data(), Inverted::memory.size(), Inverted::kCopier);
  run_ranks(2, [&](const World& world) {
    std::vector<std::byte> here(Inverted::kRefused);
    if (world->rank() == 0) {
      Request out = world->send(1, std::span<const std::byte>(Inverted::memory.data(), here.size()));
      world->wait(out);
    } else {
      Request in = world->receive(0, here);
      EXPECT_THROW(world->wait(in), Error);
    }
    world->barrier();
  });
}

// Ranks that nobody has bound share the cores, none left out; those that are bound already keep what they have.
TEST(CommThreads, RanksTakeOwnCores) {
  const std::vector<int> all = base::usable_processors();
  if (all.empty()) GTEST_SKIP() << "*** SKIPPED: no affinity masks here ***";
  for (const int ranks : {1, 2, 3, static_cast<int>(all.size()) + 1}) {
    std::mutex mutex;
    std::vector<int> taken;
    RankOptions options;
    options.pin = false;
    run_ranks(
        ranks,
        [&](const World& world) {
          const int cores = take_own_cores(*world);
          const std::vector<int> mine = base::usable_processors();
          const int in_time = std::max(1, base::quota_cores() / ranks);
          EXPECT_EQ(cores, std::min(static_cast<int>(mine.size()), in_time));
          EXPECT_EQ(take_own_cores(*world), cores);
          EXPECT_EQ(base::usable_processors(), mine);
          const std::lock_guard lock(mutex);
          taken.insert(taken.end(), mine.begin(), mine.end());
        },
        options);
    EXPECT_EQ(taken.size(), std::max(all.size(), static_cast<std::size_t>(ranks)));
    EXPECT_EQ(std::set<int>(taken.begin(), taken.end()), std::set<int>(all.begin(), all.end()));
  }
}

TEST(CommThreads, GivenUpMessagesKeepTheirPlace) {
  run_ranks(2, [](const World& world) { testing::check_given_up_send(*world); });
}

// Buffers of messages that were given up: with an owner they live on, without one they are not touched any more.
TEST(CommThreads, ForgottenMessagesGo) {
  const auto hub = std::make_shared<comm::ThreadHub>("threads", std::vector<int>(2), false);
  const auto rank0 = comm::thread_transport(hub, 0), rank1 = comm::thread_transport(hub, 1);
  std::vector<std::byte> small(8), large(std::size_t{1} << 20), other(8);
  const auto left = [&] {
    const auto awaited = rank0->receive(1, 7, other, nullptr);
    EXPECT_FALSE(rank0->test(*awaited));
    rank0->abandon(awaited);
    return hub->inboxes[0].messages.size();
  };
  rank1->send(0, 3, small, nullptr);
  const auto waiting = rank1->send(0, 4, large, nullptr);
  rank1->send(0, 6, small, nullptr);
  EXPECT_EQ(left(), 3u);
  rank0->forget(3, 3);
  EXPECT_EQ(left(), 1u);
  rank1->send(0, 5, small, nullptr);
  EXPECT_EQ(left(), 1u);
  EXPECT_FALSE(rank1->test(*waiting));
  rank1->abandon(waiting);
}

TEST(CommThreads, GivenUpMessagesAreSafe) {
  run_ranks(2, [](const World& world) {
    const int other = 1 - world->rank();
    for (const bool owned : {true, false}) {
      for (int i = 0; i < 20; ++i) {
        auto buffer = std::make_shared<std::vector<std::byte>>(100000);
        const Request send = world->send(other, *buffer, owned ? buffer : nullptr);
        Request receive;
        if (i % 2 == 1) {
          auto room = std::make_shared<std::vector<std::byte>>(100000);
          receive = world->receive(other, *room, room);
          world->test(receive);
        }
      }
    }
    world->barrier();
  });
}

}  // namespace
}  // namespace treeattn
