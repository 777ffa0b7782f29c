// SPDX-License-Identifier: Apache-2.0
// The threads attention runs on. The caller owns the pool and passes it in; the library never makes its own.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

namespace treeattn {

// A fixed set of threads, each pinned to its own core where the machine allows it. The calling thread takes part in
// the work as thread 0; where it is not on the first core when run() begins it is held there while run() lasts, and its
// affinity mask is then put back. One run at a time: concurrent run() calls from several threads take turns. The cores
// are those of the affinity mask of the thread that constructs the pool, so give each of several pools its own cores by
// setting that mask first, or, where ranks are processes, by take_own_cores() (treeattn/communicator.h). A pool of one
// pins nothing, nor does any where there are more cores than time for them (available_cores()). After fork() the child
// needs its own pool: run() throws Error.
class ThreadPool {
 public:
  // Requires 1 to 65536 threads. Throws InvalidArgument otherwise, std::system_error where so many cannot be started.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const;

  // Calls body(task, thread) for every task in [0, tasks), thread in [0, size()), and returns when all are done.
  // Which thread takes which task is not fixed. The first exception a body throws is rethrown here, after the others
  // have stopped; tasks not begun by then are skipped. Throws Error when called from inside a body of this pool.
  void run(std::size_t tasks, const std::function<void(std::size_t task, int thread)>& body);

  // Cores this process may use: those of the calling thread's affinity mask, or fewer where its control group is given
  // less of their time, as a container with a CPU limit is.
  static int available_cores();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace treeattn
