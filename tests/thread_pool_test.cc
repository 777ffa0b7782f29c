// SPDX-License-Identifier: Apache-2.0
// The pool's contract: every task once, threads in range, failures, misuse, oversubscription, pinning.
#include "treeattn/thread_pool.h"

#include <gtest/gtest.h>
#if defined(__linux__)
#include <sched.h>
#endif
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/machine.h"
#include "treeattn/error.h"

namespace treeattn {
namespace {

TEST(ThreadPool, RunsEveryTaskOnceWithThreadIdsInRange) {
  for (const int threads : {1, 2, 3, 7}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.size(), threads);
    for (const std::size_t tasks : {0u, 1u, 2u, 5u, 7u, 8u, 1000u}) {
      std::vector<std::atomic<int>> seen(tasks);
      std::atomic<int> bad_thread{0};
      pool.run(tasks, [&](std::size_t task, int thread) {
        seen.at(task).fetch_add(1);
        if (thread < 0 || thread >= threads) bad_thread.fetch_add(1);
      });
      EXPECT_EQ(bad_thread.load(), 0);
      EXPECT_TRUE(std::all_of(seen.begin(), seen.end(), [](const auto& n) { return n.load() == 1; }))
          << threads << " threads, " << tasks << " tasks";
    }
  }
}

TEST(ThreadPool, CallerIsThreadZeroAndSeesTheWorkersWrites) {
  ThreadPool pool(3);
  std::vector<std::thread::id> ids(3);
  std::vector<int> plain(300);  // not atomic: run() itself must order the writes before its return
  std::atomic<int> arrived{0};
  pool.run(3, [&](std::size_t, int thread) {
    ids[static_cast<std::size_t>(thread)] = std::this_thread::get_id();
    arrived.fetch_add(1);
    while (arrived.load() < 3) std::this_thread::yield();  // so that each thread takes exactly one task
  });
  EXPECT_EQ(ids[0], std::this_thread::get_id());
  EXPECT_NE(ids[1], ids[0]);
  EXPECT_NE(ids[2], ids[1]);
  pool.run(plain.size(), [&](std::size_t task, int) { plain[task] = static_cast<int>(task); });
  for (std::size_t i = 0; i < plain.size(); ++i) EXPECT_EQ(plain[i], static_cast<int>(i));
}

TEST(ThreadPool, RethrowsTheFirstExceptionSkipsTheRestAndStaysUsable) {
  for (const int threads : {1, 2, 7}) {
    ThreadPool pool(threads);
    std::atomic<std::size_t> begun{0};
    try {
      pool.run(100000, [&](std::size_t task, int) {
        begun.fetch_add(1);
        if (task == 3) throw std::runtime_error("task three");
        std::this_thread::sleep_for(std::chrono::microseconds(10));
      });
      FAIL() << "no exception";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "task three");
    }
    EXPECT_LT(begun.load(), 100000u);
    // All threads failing at once still gives one exception, and the next run starts clean.
    EXPECT_THROW(pool.run(50, [](std::size_t, int) { throw std::logic_error("all"); }), std::logic_error);
    std::atomic<int> done{0};
    pool.run(50, [&](std::size_t, int) { done.fetch_add(1); });
    EXPECT_EQ(done.load(), 50);
  }
}

TEST(ThreadPool, NestedRunOfTheSamePoolThrowsInsteadOfHanging) {
  for (const int threads : {1, 2, 3}) {
    ThreadPool pool(threads);
    const auto nothing = [](std::size_t, int) {};
    try {
      pool.run(8, [&](std::size_t, int) { pool.run(4, nothing); });
      FAIL() << "no exception";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("inside a body of the same pool"), std::string::npos) << error.what();
    }
    // The cycle may go through a second pool and its workers.
    ThreadPool other(2);
    EXPECT_THROW(pool.run(8, [&](std::size_t, int) { other.run(2, [&](std::size_t, int) { pool.run(1, nothing); }); }),
                 Error);
  }
}

TEST(ThreadPool, AnotherPoolInsideABodyIsFine) {
  ThreadPool outer(2);
  ThreadPool inner(2);
  std::atomic<int> done{0};
  outer.run(10, [&](std::size_t, int) { inner.run(10, [&](std::size_t, int) { done.fetch_add(1); }); });
  EXPECT_EQ(done.load(), 100);
}

TEST(ThreadPool, ManyTinyRuns) {
  for (const int threads : {2, 7}) {
    ThreadPool pool(threads);
    std::vector<long> sums(static_cast<std::size_t>(threads));
    constexpr long kRuns = 2000;
    for (long i = 0; i < kRuns; ++i) {
      // The number of tasks goes up and down, so that workers sit out some runs and must not miss the next.
      const auto tasks = static_cast<std::size_t>(i % (threads + 2));
      pool.run(tasks, [&](std::size_t, int thread) { ++sums[static_cast<std::size_t>(thread)]; });
      if (i % 500 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // long enough to fall asleep
    }
    long expected = 0;
    for (long i = 0; i < kRuns; ++i) expected += i % (threads + 2);
    long total = 0;
    for (const long sum : sums) total += sum;
    EXPECT_EQ(total, expected);
  }
}

TEST(ThreadPool, RunsFromSeveralThreadsTakeTurns) {
  ThreadPool pool(2);
  std::atomic<int> inside{0};
  std::atomic<int> overlaps{0};
  std::atomic<int> done{0};
  std::atomic<int> owner{-1};
  const auto caller = [&](int me) {
    for (int i = 0; i < 100; ++i) {
      pool.run(4, [&](std::size_t, int) {
        inside.fetch_add(1);
        owner.store(me);
        std::this_thread::yield();
        if (owner.load() != me) overlaps.fetch_add(1);
        inside.fetch_sub(1);
        done.fetch_add(1);
      });
    }
  };
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) callers.emplace_back(caller, i);
  for (std::thread& thread : callers) thread.join();
  EXPECT_EQ(overlaps.load(), 0);
  EXPECT_EQ(inside.load(), 0);
  EXPECT_EQ(done.load(), 4 * 100 * 4);
}

#if !defined(__SANITIZE_THREAD__)  // which allows no threads after a fork
TEST(ThreadPool, AfterForkTheChildGetsAnErrorInsteadOfWaiting) {
  ThreadPool pool(2);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);  // ends a child that waits
    int status = 0;
    ThreadPool(2).run(3, [](std::size_t, int) {});  // its own works
    for (const std::size_t tasks : {1, 3}) {  // one needs no other thread, but somebody's turn may have been copied
      try {
        pool.run(tasks, [](std::size_t, int) {});
        status = 1;
      } catch (const Error& error) {
        if (std::string(error.what()).find("made after fork()") == std::string::npos) status = 2;
      }
    }
    pool.~ThreadPool();
    _exit(status);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  pool.run(3, [](std::size_t, int) {});
}
#endif

TEST(ThreadPool, NeedsAThread) {
  for (const int threads : {0, -1, 1 << 30}) {
    try {
      ThreadPool pool(threads);
      FAIL() << "no exception";
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(std::to_string(threads)), std::string::npos);
    }
  }
  EXPECT_GE(ThreadPool::available_cores(), 1);
}

TEST(ThreadPool, NeedsAFunction) {
  ThreadPool pool(2);
  EXPECT_THROW(pool.run(3, nullptr), InvalidArgument);
}

TEST(Machine, ParsesProcessorLists) {
  EXPECT_EQ(base::parse_processor_list("0-3,8,10-11"), (std::vector<int>{0, 1, 2, 3, 8, 10, 11}));
  EXPECT_EQ(base::parse_processor_list("5"), (std::vector<int>{5}));
  EXPECT_TRUE(base::parse_processor_list("").empty());
  EXPECT_TRUE(base::parse_processor_list("garbage").empty());
}

#if defined(__linux__)
cpu_set_t current_mask() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  EXPECT_EQ(sched_getaffinity(0, sizeof(mask), &mask), 0);
  return mask;
}

// The one processor of a mask, or -1 when it has several.
int only_processor(const cpu_set_t& mask) {
  if (CPU_COUNT(&mask) != 1) return -1;
  for (int i = 0; i < CPU_SETSIZE; ++i) {
    if (CPU_ISSET(i, &mask)) return i;
  }
  return -1;
}

void set_mask(const std::vector<int>& processors) {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  for (const int processor : processors) CPU_SET(processor, &mask);
  EXPECT_EQ(sched_setaffinity(0, sizeof(mask), &mask), 0);
}

// Where each thread of a pool is pinned while it runs; -1: nowhere. That may be so for the caller, which is left alone
// where it is on its core already.
std::vector<int> observed_pins(int threads) {
  ThreadPool pool(threads);
  std::vector<int> pins(static_cast<std::size_t>(threads), -2);
  std::atomic<int> arrived{0};
  pool.run(static_cast<std::size_t>(threads), [&](std::size_t, int thread) {
    pins[static_cast<std::size_t>(thread)] = only_processor(current_mask());
    arrived.fetch_add(1);
    while (arrived.load() < threads) std::this_thread::yield();
  });
  return pins;
}

TEST(ThreadPool, PinsEachThreadToItsOwnCoreAndPutsTheCallersMaskBack) {
  const std::vector<int> cores = base::usable_processors();
  if (cores.size() < 2) GTEST_SKIP() << "one core: nothing to tell apart";
  if (ThreadPool::available_cores() < static_cast<int>(cores.size())) GTEST_SKIP() << "less time than cores: no pins";
  bool pinned = false;
  // The scheduler may put the caller where it belongs before the pool can, but not every time.
  for (int attempt = 0; attempt < 50 && !pinned; ++attempt) {
    set_mask({cores[1]});  // away from its core
    set_mask(cores);
    const cpu_set_t before = current_mask();
    const std::vector<int> pins = observed_pins(static_cast<int>(cores.size()));
    const cpu_set_t after = current_mask();
    EXPECT_TRUE(CPU_EQUAL(&before, &after));
    pinned = pins[0] == cores[0];
    EXPECT_TRUE(pinned || pins[0] == -1) << pins[0];
    for (std::size_t i = 1; i < pins.size(); ++i) EXPECT_EQ(pins[i], cores[i]) << "thread " << i;
  }
  EXPECT_TRUE(pinned) << "the caller was never pinned";
}

TEST(ThreadPool, MoreThreadsThanCoresWrapAround) {
  const std::vector<int> cores = base::usable_processors();
  if (ThreadPool::available_cores() < static_cast<int>(cores.size())) GTEST_SKIP() << "less time than cores: no pins";
  const int threads = 3 * static_cast<int>(cores.size()) + 1;
  const std::vector<int> pins = observed_pins(threads);
  for (std::size_t i = 1; i < pins.size(); ++i) EXPECT_EQ(pins[i], cores[i % cores.size()]) << "thread " << i;
}

TEST(ThreadPool, MasksAreRestoredAfterAnExceptionAndAPoolOfOnePinsNothing) {
  const cpu_set_t before = current_mask();
  ThreadPool pool(2);
  EXPECT_THROW(pool.run(4, [](std::size_t, int) { throw std::runtime_error("x"); }), std::runtime_error);
  cpu_set_t after = current_mask();
  EXPECT_TRUE(CPU_EQUAL(&before, &after));
  ThreadPool alone(1);
  alone.run(1, [&](std::size_t, int) { after = current_mask(); });
  EXPECT_TRUE(CPU_EQUAL(&before, &after));
}

TEST(ThreadPool, StaysInsideTheConstructorsMask) {
  const std::vector<int> cores = base::usable_processors();
  std::vector<int> pins;
  std::thread narrowed([&] {
    set_mask({cores.back()});
    pins = observed_pins(2);
  });
  narrowed.join();
  EXPECT_EQ(pins, (std::vector<int>{cores.back(), cores.back()}));
}
#endif

}  // namespace
}  // namespace treeattn
