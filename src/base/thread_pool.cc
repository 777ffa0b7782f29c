// SPDX-License-Identifier: Apache-2.0
// The pool: pinned workers that spin for a moment before they sleep, and tasks claimed from one counter.
//
// A run costs two messages per worker: its ticket goes up (start) and `pending` comes down (done). Both are waited for
// by spinning first (base/spin.h): decode calls run() every few tens of microseconds. A worker whose ticket does not
// change never looks at the job, so a run with fewer tasks than threads neither wakes nor waits for the rest. The two
// messages are sequentially consistent, as the check for sleepers inside notify_one needs.
#include "treeattn/thread_pool.h"

#if defined(__linux__)
#include <sched.h>
#endif
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/machine.h"
#include "base/spin.h"
#include "treeattn/error.h"

namespace treeattn {
namespace {

constexpr std::size_t kCacheLine = 64;

// Waits until the value differs from `old`, spinning first where that helps.
std::uint32_t wait_for_change(const std::atomic<std::uint32_t>& value, std::uint32_t old, bool spin) {
  std::uint32_t now = old;
  const auto changed = [&] { return (now = value.load(std::memory_order_acquire)) != old; };
  if (spin && base::spin_until(changed)) return now;
  while (!changed()) value.wait(old, std::memory_order_acquire);
  return now;
}

#if defined(__linux__)
// Holds the calling thread on one processor for a scope. Leaves it alone when it is there already, as it mostly is (the
// scheduler does not move it to where the pinned workers are busy, and three system calls take longer than the rest of
// a run), or when its mask does not contain that processor: then somebody else has decided where this thread runs.
class ScopedPin {
 public:
  explicit ScopedPin(int processor) {
    if (processor < 0 || ::sched_getcpu() == processor) return;
    if (::sched_getaffinity(0, sizeof(before_), &before_) != 0) return;
    if (!CPU_ISSET(processor, &before_)) return;
    base::stay_on({&processor, 1});
    pinned_ = true;
  }
  ~ScopedPin() {
    if (pinned_) ::sched_setaffinity(0, sizeof(before_), &before_);
  }
  ScopedPin(const ScopedPin&) = delete;
  ScopedPin& operator=(const ScopedPin&) = delete;

 private:
  cpu_set_t before_;
  bool pinned_ = false;
};
#else
struct ScopedPin {
  explicit ScopedPin(int) {}
};
#endif

// The bodies the current thread is inside of, innermost first. It reaches across threads: a worker's frame has the
// frame of the run() call it works for as its parent, so a cycle over two pools is seen too.
struct Frame {
  const void* pool;
  const Frame* parent;
};
thread_local const Frame* t_frame = nullptr;

class ScopedFrame {
 public:
  explicit ScopedFrame(const Frame* frame) : before_(t_frame) { t_frame = frame; }
  ~ScopedFrame() { t_frame = before_; }
  ScopedFrame(const ScopedFrame&) = delete;
  ScopedFrame& operator=(const ScopedFrame&) = delete;

 private:
  const Frame* before_;
};

}  // namespace

struct ThreadPool::Impl {
  // Own cache line: a start must not disturb the neighbours' spinning.
  struct alignas(kCacheLine) Worker {
    std::atomic<std::uint32_t> ticket{0};
    std::thread thread;
  };

  explicit Impl(int threads);
  ~Impl() { stop(); }
  void stop();
  void work(std::size_t index);
  void run_tasks(int thread);
  void run(std::size_t count, const std::function<void(std::size_t, int)>& body);

  // fork() copies the pool and none of its threads: who waited for them, or for a turn that one of them had, would wait
  // for ever.
  bool forked() const { return ::getpid() != process; }

  const int size;
  const pid_t process = ::getpid();  // the one that has the threads
  std::vector<int> processors;       // thread i belongs on processors[i % processors.size()]; empty: anywhere
  bool spin = true;
  std::vector<Worker> workers;  // worker i is thread i + 1
  std::mutex turn;              // one run at a time

  // The job: written before the tickets go up, read by the workers that got one.
  const std::function<void(std::size_t, int)>* job = nullptr;
  std::size_t tasks = 0;
  const Frame* frame = nullptr;
  std::exception_ptr failure;
  bool stopping = false;

  alignas(kCacheLine) std::atomic<std::size_t> next{0};  // first task nobody has claimed
  std::atomic<bool> failed{false};
  alignas(kCacheLine) std::atomic<std::uint32_t> pending{0};  // workers not yet done with this job
};

ThreadPool::Impl::Impl(int threads)
    : size(threads), processors(base::usable_processors()), workers(static_cast<std::size_t>(threads - 1)) {
  spin = threads <= available_cores();
  // Where time is short and not processors, they are others' as well: all containers of a machine would go to the same.
  if (available_cores() < static_cast<int>(processors.size())) processors.clear();
  try {
    for (std::size_t i = 0; i < workers.size(); ++i) {
      workers[i].thread = std::thread([this, i] { work(i); });
    }
  } catch (...) {
    stop();
    throw;
  }
}

void ThreadPool::Impl::stop() {
  stopping = true;
  for (Worker& worker : workers) {
    worker.ticket.fetch_add(1);
    worker.ticket.notify_one();
  }
  for (Worker& worker : workers) {
    if (worker.thread.joinable()) worker.thread.join();
  }
}

void ThreadPool::Impl::work(std::size_t index) {
  if (!processors.empty()) base::stay_on({&processors[(index + 1) % processors.size()], 1});
  std::uint32_t seen = 0;
  while (true) {
    seen = wait_for_change(workers[index].ticket, seen, spin);
    if (stopping) return;
    {
      const Frame mine{this, frame};
      const ScopedFrame scope(&mine);
      run_tasks(static_cast<int>(index) + 1);
    }
    if (pending.fetch_sub(1) == 1) pending.notify_one();
  }
}

// Claims tasks until none is left. After a failure none is.
void ThreadPool::Impl::run_tasks(int thread) {
  try {
    while (!failed.load(std::memory_order_relaxed)) {
      const std::size_t task = next.fetch_add(1, std::memory_order_relaxed);
      if (task >= tasks) return;
      (*job)(task, thread);
    }
  } catch (...) {
    // Only the first to fail may write; run() reads it after `pending` has come down.
    if (!failed.exchange(true, std::memory_order_acq_rel)) failure = std::current_exception();
  }
}

void ThreadPool::Impl::run(std::size_t count, const std::function<void(std::size_t, int)>& body) {
  for (const Frame* outer = t_frame; outer != nullptr; outer = outer->parent) {
    if (outer->pool == this) {
      throw Error("ThreadPool::run called from inside a body of the same pool (" + std::to_string(size) +
                  " threads), which would wait for itself; accepted: calls from outside its bodies, or another pool");
    }
  }
  if (count == 0) return;
  if (forked()) {
    throw Error("ThreadPool::run in process " + std::to_string(::getpid()) + " of a pool whose " +
                std::to_string(size) + " threads are in process " + std::to_string(process) +
                "; accepted: a pool that was made after fork()");
  }
  const std::size_t helpers = std::min(workers.size(), count - 1);
  const std::lock_guard<std::mutex> lock(turn);
  const Frame mine{this, t_frame};
  const ScopedFrame scope(&mine);

  job = &body;
  tasks = count;
  frame = mine.parent;
  next.store(0, std::memory_order_relaxed);
  failed.store(false, std::memory_order_relaxed);
  pending.store(static_cast<std::uint32_t>(helpers), std::memory_order_relaxed);
  {
    // The caller moves to its core before the others start: until it has, it may sit on one of theirs. Alone it has
    // nobody to get out of the way of.
    const ScopedPin pin(helpers > 0 && !processors.empty() ? processors.front() : -1);
    for (std::size_t i = 0; i < helpers; ++i) {
      workers[i].ticket.fetch_add(1);
      workers[i].ticket.notify_one();
    }
    run_tasks(0);
    std::uint32_t left = pending.load(std::memory_order_acquire);
    while (left != 0) left = wait_for_change(pending, left, spin);
  }
  job = nullptr;
  if (failure) std::rethrow_exception(std::exchange(failure, nullptr));
}

ThreadPool::ThreadPool(int threads) {
  constexpr int kMost = 1 << 16;
  if (threads < 1 || threads > kMost) {
    throw InvalidArgument("ThreadPool: threads is " + std::to_string(threads) + "; accepted: 1 to " +
                          std::to_string(kMost));
  }
  impl_ = std::make_unique<Impl>(threads);
}

ThreadPool::~ThreadPool() {
  if (impl_->forked()) static_cast<void>(impl_.release());  // nobody to stop, and the memory may be in their hands
}

int ThreadPool::size() const { return impl_->size; }

void ThreadPool::run(std::size_t tasks, const std::function<void(std::size_t task, int thread)>& body) {
  if (!body) throw InvalidArgument("ThreadPool::run: body is empty; accepted: a function");
  impl_->run(tasks, body);
}

int ThreadPool::available_cores() { return base::usable_cores(); }

}  // namespace treeattn
