// SPDX-License-Identifier: Apache-2.0
// Ranks that are threads, and some of them are lost: the others name them within the deadline, shrink and go on.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>

#include "comm/note.h"
#include "comm_cases.h"
#include "passing_transport.h"
#include "thinning.h"

namespace treeattn {
namespace {

using testing::check_chain;
using testing::comm_cases;
using World = std::shared_ptr<Communicator>;
using Clock = std::chrono::steady_clock;

// steady_machine.py gives a longer one to a machine that stands still at times.
const Seconds kDeadline = [] {
  const char* given = std::getenv("TREEATTN_TEST_DEADLINE");
  return Seconds(given != nullptr ? std::atof(given) : 1.0);
}();
const Seconds kSlack = 0.5 * kDeadline;  // others use this machine
constexpr Seconds kPatience{60};

RankOptions short_deadline() {
  RankOptions options;
  options.deadline = kDeadline;
  return options;
}

// Where all ranks of a test have come before any goes on. Not a barrier of theirs: when one rank has left that, others
// may be in it still, and would notice there that it is gone.
class Meeting {
 public:
  explicit Meeting(int ranks) : ranks_(ranks) {}
  void come() {
    come_.fetch_add(1);
    const auto start = Clock::now();
    while (come_.load() < ranks_) {
      if (Clock::now() - start > kPatience) throw std::runtime_error("a rank did not come to the meeting");
      std::this_thread::yield();
    }
  }

 private:
  const int ranks_;
  std::atomic<int> come_{0};
};

// Everything still works, however busy the machine is.
void go_on(Communicator& rest) {
  rest.set_deadline(kPatience);
  const auto& cases = comm_cases();
  for (std::size_t i = 0; i < cases.size(); i += thinning()) cases[i].run(rest);
}

// Calls fn until it throws LostRanks and checks who is named, and that it took no longer than the deadline.
template <class Fn>
void expect_lost(Communicator& group, const std::vector<int>& lost, const Fn& fn) {
  const auto start = Clock::now();
  try {
    fn();
    ADD_FAILURE() << "rank " << group.rank() << ": nobody is missed";
  } catch (const LostRanks& error) {
    EXPECT_EQ(error.ranks(), lost) << "rank " << group.rank() << ": " << error.what();
    EXPECT_EQ(group.lost(), lost);
  }
  EXPECT_LT(Seconds(Clock::now() - start), kDeadline + kSlack) << "rank " << group.rank();
  // Every later call says the same, at once.
  const auto again = Clock::now();
  try {
    group.barrier();
    ADD_FAILURE() << "the group still works";
  } catch (const LostRanks& error) {
    EXPECT_EQ(error.ranks(), lost);
  }
  EXPECT_LT(Seconds(Clock::now() - again), kSlack);
}

// Makes the ranks `lost` go in one of several ways, then has the rest find out, shrink, and go on.
enum class Way { kReturn, kThrow, kSleep };

void lose_and_go_on(int ranks, const std::vector<int>& lost, Way way, const std::function<void(Communicator&)>& call) {
  std::atomic<int> went_on{0};
  Meeting meeting(ranks);
  const auto body = [&](const World& world) {
    world->set_deadline(kPatience);
    check_chain(*world, 3);
    meeting.come();
    world->set_deadline(kDeadline);
    if (std::find(lost.begin(), lost.end(), world->rank()) != lost.end()) {
      if (way == Way::kThrow) throw std::domain_error("lost");
      if (way == Way::kReturn) return;
      std::this_thread::sleep_for(1.5 * kDeadline);
      // It finds that it has been given up, and cannot come along.
      EXPECT_THROW(world->barrier(), LostRanks);
      EXPECT_EQ(world->lost(), lost);
      EXPECT_THROW(world->shrink(), LostRanks);
      return;
    }
    expect_lost(*world, lost, [&] {
      for (;;) call(*world);
    });
    const World rest = world->shrink();
    EXPECT_EQ(rest->size(), ranks - static_cast<int>(lost.size()));
    EXPECT_TRUE(rest->lost().empty());
    go_on(*rest);
    went_on.fetch_add(1);
  };
  if (way == Way::kThrow) {
    EXPECT_THROW(run_ranks(ranks, body, short_deadline()), std::domain_error);
  } else {
    run_ranks(ranks, body, short_deadline());
  }
  EXPECT_EQ(went_on.load(), ranks - static_cast<int>(lost.size()));
}

class CommLoss : public ::testing::TestWithParam<Way> {};

TEST_P(CommLoss, InAllreduce) {
  for (const int lost : {0, 2, 3}) {
    lose_and_go_on(4, {lost}, GetParam(), [](Communicator& world) { check_chain(world, 3); });
  }
}

TEST_P(CommLoss, InLargeAllreduce) {
  lose_and_go_on(3, {1}, GetParam(), [](Communicator& world) { check_chain(world, 20000); });
}

TEST_P(CommLoss, InOtherCollectives) {
  lose_and_go_on(5, {4}, GetParam(), [](Communicator& world) { world.barrier(); });
  lose_and_go_on(5, {1}, GetParam(), [](Communicator& world) {
    std::vector<std::byte> data(100);
    world.broadcast(data, 0);
    world.broadcast(data, world.size() - 1);
  });
}

TEST_P(CommLoss, InPointToPoint) {
  lose_and_go_on(4, {2}, GetParam(), [](Communicator& world) { testing::check_ring(world); });
}

TEST_P(CommLoss, TwoAtOnce) {
  lose_and_go_on(7, {0, 5}, GetParam(), [](Communicator& world) { check_chain(world, 3); });
}

INSTANTIATE_TEST_SUITE_P(Ways, CommLoss, ::testing::Values(Way::kReturn, Way::kThrow, Way::kSleep),
                         [](const auto& test) {
                           return test.param == Way::kReturn ? "Return" : test.param == Way::kThrow ? "Throw" : "Sleep";
                         });

TEST(CommThreadLoss, SaysWhoAndWhere) {
  run_ranks(
      3,
      [](const World& world) {
        if (world->rank() == 1) {
          std::this_thread::sleep_for(1.5 * kDeadline);
          return;
        }
        try {
          check_chain(*world, 1);
          ADD_FAILURE();
        } catch (const LostRanks& error) {
          EXPECT_EQ(error.what(),
                    fmt::format("rank 1 of 3 did not answer within {:.1f} s in allreduce", kDeadline.count()));
        }
      },
      short_deadline());
}

// Two ranks that never come, one after the other, with work in between.
TEST(CommThreadLoss, AgainAfterShrink) {
  Meeting of_five(5), of_four(4);
  run_ranks(
      6,
      [&](const World& world) {
        if (world->rank() == 3) return;
        expect_lost(*world, {3}, [&] { check_chain(*world, 3); });
        const World five = world->shrink();
        for (int i = 0; i < 3; ++i) check_chain(*five, 3);
        of_five.come();
        if (five->rank() == 0) {
          std::this_thread::sleep_for(1.5 * kDeadline);
          return;
        }
        expect_lost(*five, {0}, [&] { check_chain(*five, 3); });
        const World four = five->shrink();
        EXPECT_EQ(four->size(), 4);
        go_on(*four);
        // And once more, in a group of it.
        const auto half = four->split(four->rank() / 2, 0);
        of_four.come();
        if (four->rank() == 3) return;
        EXPECT_THROW(for (;;) check_chain(*half, 1), LostRanks);
        expect_lost(*four, {3}, [&] { check_chain(*four, 1); });
        // The same group can be shrunk more than once.
        for (int i = 0; i < 3; ++i) check_chain(*four->shrink(), 1);
        for (int i = 0; i < 3 && half->size() > 1; ++i) check_chain(*half->shrink(), 1);
      },
      short_deadline());
}

// A group without a rank counts from 0 again; what is known of the losses is told in the first numbers as well.
TEST(CommThreadLoss, NumbersThatRanksWereStartedWith) {
  run_ranks(
      5,
      [](const World& world) {
        if (world->rank() == 0) return;
        expect_lost(*world, {0}, [&] { world->barrier(); });
        if (world->rank() == 2) return;  // found missing while the others shrink
        const World three = world->shrink();
        if (world->rank() == 3) return;
        try {
          three->barrier();
          ADD_FAILURE();
        } catch (const LostRanks& error) {
          EXPECT_STREQ(error.what(), "rank 1 of 3 (rank 3 of 5 at first) is gone, noticed in barrier");
          EXPECT_EQ(error.ranks(), std::vector{1});
          EXPECT_EQ(error.lost_so_far(), (std::vector{0, 2, 3}));
        }
      },
      short_deadline());
}

// What a rank that was lost owes the old group is nothing that the new one can wait for.
TEST(CommThreadLoss, RequestsStayWithTheirGroup) {
  run_ranks(3, [](const World& world) {
    std::byte byte{};
    Request owed;
    if (world->rank() == 0) owed = world->receive(2, {&byte, 1});
    if (world->rank() == 2) return;
    EXPECT_THROW(world->barrier(), LostRanks);
    const World rest = world->shrink();
    if (world->rank() == 0) {
      EXPECT_THROW(rest->wait(owed), InvalidArgument);
      EXPECT_THROW(rest->test(owed), InvalidArgument);
    }
    go_on(*rest);
  });
}

// A rank that is lost after LostRanks, before or in shrink(), is left out of the new group as well.
TEST(CommThreadLoss, WhileShrinking) {
  for (const bool sleeps : {false, true}) {
    run_ranks(
        5,
        [&](const World& world) {
          if (world->rank() == 1) return;
          expect_lost(*world, {1}, [&] { check_chain(*world, 3); });
          if (world->rank() == 2) {
            if (sleeps) std::this_thread::sleep_for(1.5 * kDeadline);
            return;
          }
          const World rest = world->shrink();
          EXPECT_EQ(world->lost(), (std::vector{1, 2}));
          EXPECT_EQ(rest->size(), 3);
          go_on(*rest);
        },
        short_deadline());
  }
}

// What rank 2 says in shrink() does not come.
class DeafToRank2 final : public testing::PassingTransport {
 public:
  using PassingTransport::PassingTransport;
  std::optional<comm::ReceivedNote> next_note() override {
    for (;;) {
      auto note = PassingTransport::next_note();
      if (!note || note->from != 2) return note;
      if (comm::parse_note(2, size(), note->bytes).head.kind != comm::Note::Kind::kShrink) return note;
    }
  }
};

// Rank 2 is lost in shrink(), and its last word has come to rank 0 alone, who has agreed with it. Rank 1 misses it and
// hears from rank 0 what was agreed.
TEST(CommThreadLoss, WhileShrinkingByItsLastWordToOne) {
  const auto wrap = [](int rank, std::shared_ptr<comm::Transport> transport) -> std::shared_ptr<comm::Transport> {
    if (rank == 1) return std::make_shared<DeafToRank2>(std::move(transport));
    return transport;
  };
  std::atomic<int> went_on{0};
  Meeting of_those_who_agreed(2);
  testing::run_ranks_through(4, wrap, [&](const World& world) {
    if (world->rank() == 3) return;
    world->set_deadline(kDeadline);
    expect_lost(*world, {3}, [&] { world->barrier(); });
    const World rest = world->shrink();
    EXPECT_EQ(rest->size(), 3);
    if (rest->rank() != 1) of_those_who_agreed.come();
    if (rest->rank() == 2) return;
    expect_lost(*rest, {2}, [&] { rest->barrier(); });
    const World last = rest->shrink();
    EXPECT_EQ(last->size(), 2);
    go_on(*last);
    ++went_on;
  });
  EXPECT_EQ(went_on, 2);
}

// The rank that is lost has passed the result of a reduction on to one of two: the other survivors are a step apart.
TEST(CommThreadLoss, OneStepApart) {
  Meeting meeting(4);
  run_ranks(
      4,
      [&](const World& world) {
        std::vector<std::uint64_t> up(1), down(1);
        int steps = 0;
        const auto exchange = [&](bool last) {
          if (world->rank() == 0) {
            for (const int other : {1, 2, 3}) {
              Request request = world->receive(other, testing::bytes_of(up));
              world->wait(request);
            }
            for (const int other : {1, 2, 3}) {
              if (last && other != 2) continue;
              Request request = world->send(other, testing::bytes_of(down));
              world->wait(request);
            }
          } else {
            std::array<Request, 2> requests;
            requests[0] = world->send(0, testing::bytes_of(up));
            requests[1] = world->receive(0, testing::bytes_of(down));
            world->wait_all(requests);
          }
          ++steps;
        };
        exchange(false);
        meeting.come();
        if (world->rank() == 0) {
          exchange(true);
          return;
        }
        expect_lost(*world, {0}, [&] {
          exchange(true);
          // Only rank 2 comes here, and does something else.
          EXPECT_EQ(world->rank(), 2);
          world->barrier();
        });
        EXPECT_EQ(steps, world->rank() == 2 ? 2 : 1);
        go_on(*world->shrink());
      },
      short_deadline());
}

// Two levels: rank 3 is lost in its node's group, and the others wait in groups that it is not in.
TEST(CommThreadLoss, InAGroupThatOthersAreNotIn) {
  for (const bool sleeps : {false, true}) {
    Meeting meeting(6);
    run_ranks(
        6,
        [&](const World& world) {
          const auto node = world->split(world->rank() / 2, 0);
          const auto leaders = world->split(world->rank() % 2 == 0 ? 0 : -1, 0);
          const auto step = [&] {
            check_chain(*node, 3);
            if (leaders != nullptr) check_chain(*leaders, 3);
            std::vector<std::byte> data(8);
            node->broadcast(data, 0);
          };
          for (int i = 0; i < 3; ++i) step();
          meeting.come();
          if (world->rank() == 3) {
            if (sleeps) std::this_thread::sleep_for(1.5 * kDeadline);
            return;
          }
          const auto start = Clock::now();
          try {
            for (;;) step();
          } catch (const LostRanks& error) {
            // Named in the numbers of the group that threw, which may not have had it.
            EXPECT_EQ(error.ranks().size(), world->rank() == 2 ? 1u : 0u) << error.what();
          }
          EXPECT_LT(Seconds(Clock::now() - start), kDeadline + kSlack);
          EXPECT_EQ(world->lost(), std::vector{3});
          const World rest = world->shrink();
          EXPECT_EQ(rest->size(), 5);
          go_on(*rest);
        },
        short_deadline());
  }
}

// A rank that comes late, but while the roll is called: everybody leaves the call, and names the same rank.
TEST(CommThreadLoss, AnsweredButTooSlow) {
  run_ranks(
      4,
      [](const World& world) {
        if (world->rank() == 3) std::this_thread::sleep_for(0.75 * kDeadline);
        try {
          check_chain(*world, 3);
          ADD_FAILURE();
        } catch (const LostRanks& error) {
          EXPECT_EQ(error.ranks(), std::vector{3}) << error.what();
        }
        if (world->rank() == 3) {
          EXPECT_THROW(world->shrink(), LostRanks);
          return;
        }
        check_chain(*world->shrink(), 3);
      },
      short_deadline());
}

}  // namespace
}  // namespace treeattn
