// SPDX-License-Identifier: Apache-2.0
// A decoding loop over MPI that loses ranks: killed, stopped, or cut off by whoever runs this. The survivors go on with
// the branches of the lost ones rebuilt, and every token has the bits of the undisturbed run.
//
// Usage: decode_loss_mpi_test DEADLINE none|kill|stop VICTIM
// With `none` the ranks wait a little in every step, so that something can happen to them from outside; rank 0 says
// which step it is at. Every survivor ends with the line "rank R: same bits, lost A B ..."; R and the lost ranks in the
// numbering of the launch.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <thread>

#include "decode_loop.h"
#include "treeattn/error.h"

namespace {

using namespace treeattn;
using testing_parallel::Loop;

struct Fault {
  double deadline = 2;
  std::string way;
  int victim = 0;
  static constexpr std::int64_t kStep = 20;
};

void suffer(const Fault& fault, int rank, std::int64_t step) {
  if (fault.way == "none") std::this_thread::sleep_for(std::chrono::milliseconds(100));
  if (rank != fault.victim || step != Fault::kStep) return;
  if (fault.way == "kill") std::raise(SIGKILL);
  if (fault.way == "stop") std::raise(SIGSTOP);
}

int run(const Fault& fault) {
  RankOptions options;
  options.deadline = Seconds(fault.deadline);
  std::shared_ptr<Communicator> world = mpi_communicator(options);
  const int rank = world->rank();
  std::vector<int> name_of(static_cast<std::size_t>(world->size()));  // in the numbering of the launch
  for (std::size_t i = 0; i < name_of.size(); ++i) name_of[i] = static_cast<int>(i);
  std::string lost;

  const Loop loop;
  const auto want = loop.undisturbed();
  ThreadPool pool(1);
  KvCache cache(world, loop.config());
  auto attention = std::make_unique<ParallelAttention>(world);
  const SequenceId id = cache.add_sequence();
  loop.append(cache, id, 0, Loop::kPrompt);
  for (std::int64_t step = 0; step < Loop::kSteps; ++step) {
    if (rank == 0) std::printf("step %d\n", static_cast<int>(step));
    std::fflush(stdout);
    if (Loop::last_step(cache, id) < step) loop.append(cache, id, Loop::kPrompt + step, 1);
    const auto start = std::chrono::steady_clock::now();
    try {
      suffer(fault, rank, step);
      if (loop.decode(*attention, cache, id, step, pool) != want[static_cast<std::size_t>(step)]) {
        std::printf("rank %d: other bits at step %d\n", rank, static_cast<int>(step));
        return 1;
      }
    } catch (const LostRanks& error) {
      const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      std::printf("rank %d: %.2f s: %s\n", rank, seconds, error.what());
      if (seconds > 1.25 * fault.deadline) return 1;
      std::vector<int> left;
      for (int r = 0; r < world->size(); ++r) {
        const int name = name_of[static_cast<std::size_t>(r)];
        const bool gone = std::find(error.ranks().begin(), error.ranks().end(), r) != error.ranks().end();
        gone ? lost += " " + std::to_string(name) : (left.push_back(name), lost);
      }
      name_of = left;
      world = world->shrink();
      for (const TokenRange& range : cache.adopt(world)) loop.write(cache, range);
      attention = std::make_unique<ParallelAttention>(world);
      step = Loop::last_step(cache, id) - 1;
    }
  }
  std::printf("rank %d: same bits, lost%s\n", rank, lost.c_str());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  int status = 1;
  try {
    status = run({std::atof(argv[1]), argv[2], std::atoi(argv[3])});
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
  }
  std::fflush(stdout);
  return status;
}
