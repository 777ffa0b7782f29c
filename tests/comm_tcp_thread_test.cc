// SPDX-License-Identifier: Apache-2.0
// Ranks connected by TCP: the one list of cases, attention over them, messages given up, and ranks that are lost.
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "address_limit.h"
#include "comm_cases.h"
#include "parallel_checks.h"
#include "tcp_ranks.h"

namespace treeattn {
namespace {

using testing::run_tcp_processes;
using testing::run_tcp_threads;
using testing::with_deadline;

class TcpRanks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, TcpRanks, ::testing::Values(1, 2, 3, 5, 8), ::testing::PrintToStringParamName());

TEST_P(TcpRanks, CaseList) {
  for (const auto& one : testing::comm_cases()) {
    SCOPED_TRACE(one.name);
    run_tcp_threads(GetParam(), [&](std::shared_ptr<Communicator> world) {
      testing::expect(world->transport() == "tcp" && world->size() == GetParam(), "another world");
      testing::expect(world->nodes() == 1, "{} nodes on one machine", world->nodes());
      one.run(*world);
      world->barrier();
    });
  }
}

TEST_P(TcpRanks, EveryStrategyHasTheSameBits) {
  const auto cases = testing_parallel::prepared_cases(23, static_cast<std::size_t>(GetParam()));
  std::mutex mutex;
  run_tcp_threads(GetParam(), [&](std::shared_ptr<Communicator> world) {
    const auto failures = testing_parallel::check_strategies(world, cases);
    const std::scoped_lock lock(mutex);
    for (const std::string& failure : failures) ADD_FAILURE() << failure;
  });
}

// What is given up half way does not harm what follows, on either side.
TEST(Tcp, MessagesGivenUp) {
  run_tcp_threads(2, [](std::shared_ptr<Communicator> world) {
    const int other = 1 - world->rank();
    constexpr std::size_t kBytes = std::size_t{8} << 20;
    for (int i = 0; i < 3; ++i) {
      auto out = std::make_shared<std::vector<std::byte>>(kBytes),
           in = std::make_shared<std::vector<std::byte>>(kBytes);
      {
        Request receive = world->receive(other, *in, in);
        Request send = world->send(other, *out, out);
        for (int t = 0; t < i; ++t) world->test(receive);
      }
      out.reset();
      in.reset();
      world->barrier();
    }
    // Sends that had begun arrive after all; the group is told apart by a new context.
    const auto fresh = world->split(0, world->rank());
    testing::check_ring(*fresh);
    testing::check_chain(*fresh, 100);
  });
}

TEST(Tcp, GivenUpMessagesKeepTheirPlace) {
  run_tcp_threads(2, [](std::shared_ptr<Communicator> world) { testing::check_given_up_send(*world); });
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // which end the program in the place of bad_alloc
// A message is given up in a destructor, which cannot say that there is no memory: it must do without.
TEST(Tcp, GivingUpHalfAMessageTakesNoMemory) {
  constexpr std::size_t kBytes = std::size_t{128} << 20;
  const auto give_up = [](Request& request) {
    const testing_base::AddressLimit limit(kBytes / 4);
    request = Request();
  };
  for (const bool sender : {false, true}) {
    std::atomic<bool> half_there = false;
    run_tcp_threads(2, [&](std::shared_ptr<Communicator> world) {
      auto data = std::make_shared<std::vector<std::byte>>(kBytes, static_cast<std::byte>(1 - world->rank()));
      std::vector<std::byte> small = testing::pattern(100, world->rank());
      if (world->rank() == 0) {
        Request large = world->send(1, *data, data);  // as much as the system takes, and the rest while this rank waits
        while (!half_there) std::this_thread::yield();
        if (sender) give_up(large);
        Request request = world->send(1, small);
        world->wait(request);
        world->wait(large);
      } else {
        Request large = world->receive(0, *data, data);
        while (data->front() != std::byte{1}) EXPECT_FALSE(world->test(large));
        if (!sender) give_up(large);
        half_there = true;
        Request request = world->receive(0, small);
        world->wait(request);
        world->wait(large);
        EXPECT_EQ(small, testing::pattern(100, 0));
        EXPECT_EQ(data->back(), sender ? std::byte{1} : std::byte{0});
      }
      world->barrier();
    });
  }
}
#endif

// From rank 0 to rank 1, more than the system holds for a receiver that is busy elsewhere.
void hand_over(Communicator& world) {
  constexpr int kMessages = 500;
  std::vector<std::byte> data(std::size_t{64} << 10);
  if (world.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(500));
  for (int i = 0; i < kMessages; ++i) {
    Request request = world.rank() == 0 ? world.send(1, data) : world.receive(0, data);
    world.wait(request);
  }
}

// What is done for its sender comes, though that goes.
TEST(Tcp, ASenderThatLeavesHasSentWhatItSaid) {
  run_tcp_threads(
      2, [](std::shared_ptr<Communicator> world) { hand_over(*world); }, with_deadline(60));
}

// The same of one that has gone on without a lost rank.
TEST(Tcp, ASurvivorThatLeavesHasSentWhatItSaid) {
  run_tcp_threads(
      3,
      [](std::shared_ptr<Communicator> world) {
        if (world->rank() == 2) return;
        EXPECT_THROW(world->barrier(), LostRanks);
        hand_over(*world->shrink());
      },
      with_deadline(60));
}

// A rank that closes its end, in the middle of things.
TEST(Tcp, SurvivorsOfALostRankGoOn) {
  for (const int lost : {0, 2}) {
    std::atomic<int> named = 0;
    run_tcp_threads(
        4,
        [&](std::shared_ptr<Communicator> world) {
          try {
            testing::check_chain(*world, 10);  // others may still be in it when the lost one is through
            if (world->rank() == lost) return;
            for (int i = 0; i < 10; ++i) world->barrier();
            ADD_FAILURE() << "nobody was missed";
          } catch (const LostRanks& error) {
            if (error.ranks() == std::vector<int>{lost}) ++named;
          }
          const auto survivors = world->shrink();
          testing::expect(survivors->size() == 3, "{} survivors", survivors->size());
          testing::check_chain(*survivors, 10);
          testing::check_ring(*survivors);
        },
        with_deadline(20));
    EXPECT_EQ(named, 3);
  }
}

#if !defined(__SANITIZE_THREAD__)  // does not fork
// A process that is killed.
// What a rank sent before another was lost, in this group and in one split from it, takes up nothing of the room that
// there is for what comes early in the next group.
TEST(Tcp, WhatWasUnderWayGoesWithItsGroup) {
  constexpr int kRanks = 3;
  const std::vector<std::byte> data(std::size_t{75} << 20);  // the room is 256 MiB where there is little memory
  const int port = testing::free_port();
  const auto tell = [&](Communicator& to) {
    std::vector<Request> sends;
    if (to.rank() == 1) sends.push_back(to.send(0, data));
    to.wait_all(sends);
    to.barrier();
  };
  const auto body = [&](int rank, std::shared_ptr<Communicator> world) {
    const auto part = world->split(0, 0);
    tell(*world);
    tell(*part);
    if (rank == 2) return;
    EXPECT_THROW(world->barrier(), LostRanks);
    const auto rest = world->shrink();
    rest->set_deadline(Seconds(60));
    tell(*rest);
    tell(*rest);
    for (int i = 0; i < 2 && rank == 0; ++i) {
      std::vector<std::byte> came(data.size());
      Request receive = rest->receive(1, came);
      rest->wait(receive);
    }
  };
  const auto run = [&](int rank, std::shared_ptr<Communicator> world) {
    try {
      body(rank, std::move(world));
    } catch (const Error& error) {
      ADD_FAILURE() << "rank " << rank << ": " << error.what();
    }
  };
  std::vector<std::thread> others;
  for (int rank = 1; rank < kRanks; ++rank) {
    others.emplace_back([&, rank] { run(rank, tcp_communicator(TcpPlace{rank, kRanks, "127.0.0.1", port})); });
  }
  std::shared_ptr<Communicator> world;
  {
    const testing_base::AddressLimit limit(std::size_t{256} << 20);
    world = tcp_communicator(TcpPlace{0, kRanks, "127.0.0.1", port});
  }
  run(0, std::move(world));
  for (std::thread& other : others) other.join();
}

TEST(Tcp, SurvivorsOfAKilledProcessGoOn) {
  const std::vector<int> statuses = run_tcp_processes(
      3,
      [](std::shared_ptr<Communicator> world) {
        bool missed = false;
        try {
          testing::check_chain(*world, 10);
          if (world->rank() == 1) ::raise(SIGKILL);
          for (int i = 0; i < 10; ++i) testing::check_ring(*world);
        } catch (const LostRanks& error) {
          missed = error.ranks() == std::vector<int>{1};
        }
        testing::expect(missed, "rank 1 was not missed");
        const auto survivors = world->shrink();
        testing::check_chain(*survivors, 10);
      },
      with_deadline(20));
  EXPECT_EQ(statuses, (std::vector<int>{0, 128 + SIGKILL, 0}));
}

// Ranks that call each other all the time, until rank 0 has had enough.
void stay_in_touch(Communicator& world) {
  world.set_deadline(Seconds(1));
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(3500);
  for (std::vector<std::byte> over(1); over[0] == std::byte{0};) {
    if (world.rank() == 0 && std::chrono::steady_clock::now() > end) over[0] = std::byte{1};
    world.broadcast(over, 0);
    world.barrier();
  }
}

// All stop together for twice the deadline, as when a machine is paused.
TEST(Tcp, NobodyIsMissedBecauseAllStoodStill) {
  const auto pause = [](const std::vector<pid_t>& processes) {
    for (const int signal : {SIGSTOP, SIGCONT}) {
      std::this_thread::sleep_for(std::chrono::milliseconds(signal == SIGSTOP ? 500 : 2000));
      for (const pid_t process : processes) ::kill(process, signal);
    }
  };
  const auto processes = [](const std::shared_ptr<Communicator>& world) { stay_in_touch(*world); };
  EXPECT_EQ(run_tcp_processes(3, processes, with_deadline(20), pause), std::vector<int>(3, 0));
  const auto threads = [](const std::shared_ptr<Communicator>&) {
    run_ranks(3, [](const std::shared_ptr<Communicator>& world) { stay_in_touch(*world); });
  };
  EXPECT_EQ(run_tcp_processes(1, threads, {}, pause), std::vector<int>(1, 0));
}
#endif

}  // namespace
}  // namespace treeattn
