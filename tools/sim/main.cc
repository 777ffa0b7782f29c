// SPDX-License-Identifier: Apache-2.0
// treeattn-sim: the ranks of a cluster as SimGrid's actors, with SimGrid's MPI between them. Started by `treeattn
// simulate`: reads one SimulationJob from stdin and writes one SimulationLine a line to stdout.
#include <fmt/format.h>
#include <malloc.h>
#include <mpi.h>
#include <smpi/smpi.h>
#include <xbt/log.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <iterator>
#include <new>
#include <simgrid/s4u.hpp>
#include <string>

#include "base/timing.h"
#include "command.h"
#include "no_memory.h"
#include "notes.h"
#include "platform.h"
#include "rank.h"
#include "scenario.h"
#include "treeattn/error.h"

namespace treeattn::tools {
namespace {

namespace sg4 = simgrid::s4u;

// Longer than any simulation runs: the library's deadlines are of the real clock.
constexpr Seconds kNoDeadline{1e9};

// All measurements of a job, one after the other. The ranks call into one object: they take turns in one thread.
class Simulation {
 public:
  explicit Simulation(SimulationJob job)
      : scenario_(std::move(job)), barrier_(sg4::Barrier::create(static_cast<unsigned>(scenario_.job().ranks))) {}

  const Scenario& scenario() const { return scenario_; }

  // Whenever the simulated clock moves: how far this call has come, by the time it should take.
  void on_time() {
    if (simulating_) print_progress(std::min(1.0, (sg4::Engine::get_clock() - start_s_) / cost_.seconds));
  }

  // Before the first call. With thousands of ranks that takes seconds.
  void on_preparation() { print_progress(0); }

  // Of one rank.
  void run_rank() {
    MPI_Init(nullptr, nullptr);
    on_preparation();
    {
      const auto world = mpi_communicator(RankOptions{kNoDeadline, scenario_.network().node_of_rank, false});
      for (const std::int64_t tokens : scenario_.job().tokens) {
        for (const Strategy strategy : scenario_.job().strategies) measure(*world, strategy, tokens);
      }
    }
    MPI_Finalize();
  }

 private:
  // SimGrid's barrier takes no simulated time: all ranks begin at the same instant.
  void measure(Communicator& world, Strategy strategy, std::int64_t tokens) {
    if (world.rank() == 0) begin(strategy, tokens);
    barrier_->wait();
    add(world.rank(), decode_step(scenario_, world));
    barrier_->wait();
    if (world.rank() == 0) print();
  }

  void begin(Strategy strategy, std::int64_t tokens) {
    ::malloc_trim(0);  // the last strategy's buffers: at thousands of ranks hundreds of megabytes
    wall_start_ = last_progress_ = std::chrono::steady_clock::now();
    scenario_.choose(strategy, tokens);
    start_s_ = sg4::Engine::get_clock();
    cost_ = scenario_.closed_form();
    simulating_ = true;
    line_ = {};
    line_.strategy = strategy;
    line_.tokens = tokens;
  }

  void add(int rank, const RankReport& report) {
    line_.us = std::max(line_.us, 1e6 * report.end_s);
    line_.local_us = std::max(line_.local_us, 1e6 * report.local_s);
    line_.steps = std::max(line_.steps, report.traffic.steps);
    line_.messages += report.traffic.messages;
    line_.bytes += report.traffic.bytes;
    line_.remote_bytes += report.traffic.remote_bytes;
    line_.device_bytes = std::max(line_.device_bytes, report.device_bytes);
    if (line_.failure.empty() && !report.failure.empty()) {
      line_.failure = fmt::format("rank {}: {}", rank, report.failure);
    }
  }

  // A number a line, between the results: how far this one has come.
  void print_progress(double part) {
    const auto now = std::chrono::steady_clock::now();
    if (now - last_progress_ < std::chrono::milliseconds(100)) return;
    last_progress_ = now;
    fmt::print("{:.3f}\n", part);
    std::fflush(stdout);
  }

  void print() {
    simulating_ = false;
    line_.closed_form_us = 1e6 * cost_.seconds;
    line_.closed_form_bytes = cost_.bytes;
    if (line_.failure.empty() && line_.bytes != cost_.bytes) {
      line_.failure = fmt::format("{} bytes were sent; the closed form says {}", line_.bytes, cost_.bytes);
    }
    line_.wall_s = base::seconds_since(wall_start_);
    fmt::print("{}\n", line_.to_json());
    std::fflush(stdout);
  }

  Scenario scenario_;
  sg4::BarrierPtr barrier_;
  SimulationLine line_;
  plan::Cost cost_;  // by the closed form
  bool simulating_ = false;
  double start_s_ = 0;  // of the simulated clock
  std::chrono::steady_clock::time_point wall_start_;
  std::chrono::steady_clock::time_point last_progress_;
};

int fail(const std::exception& error, int code) {
  print_note("treeattn: {}\n", error.what());
  return code;
}

// SimGrid aborts where it gets no memory for a stack or a message.
void on_abort(int) {
  if (memory_limit(RLIMIT_AS) > 0 || memory_limit(RLIMIT_DATA) > 0) std::_Exit(fail_no_memory());
}

// What a rank throws must not reach SimGrid, which would abort.
void run_rank(Simulation& simulation) {
  try {
    simulation.run_rank();
  } catch (const simgrid::ForcefulKillException&) {
    throw;
  } catch (const std::bad_alloc&) {
    std::_Exit(fail_no_memory());
  } catch (const std::exception& error) {
    std::_Exit(fail(error, kCheckFailed));
  }
}

int run(int argc, char** argv) {
  std::signal(SIGABRT, on_abort);
  xbt_log_control_set("root.thresh:warning");
  const auto on_interrupt = std::signal(SIGINT, SIG_DFL);
  sg4::Engine engine(&argc, argv);
  std::signal(SIGINT, on_interrupt);  // SimGrid's own handler complains, which is no answer to Ctrl-C
  const std::string text((std::istreambuf_iterator<char>(std::cin)), std::istreambuf_iterator<char>());
  configure_simulator();
  Simulation simulation(SimulationJob::from_json(text));
  const SimulationJob& job = simulation.scenario().job();
  const auto hosts = make_platform(simulation.scenario().cluster(), job.ranks, job.ranks_per_node,
                                   [&simulation] { simulation.on_preparation(); });
  SMPI_init();
  const char* const application = "decode";
  SMPI_app_instance_register(
      application, [](int, char**) {}, job.ranks);
  for (int rank = 0; rank < job.ranks; ++rank) {
    const std::string number = std::to_string(rank);
    sg4::ActorPtr actor = sg4::Actor::init("rank" + number, hosts[static_cast<std::size_t>(rank)]);
    actor->set_property("instance_id", application);
    actor->set_property("rank", number);
    actor->start([&simulation] { run_rank(simulation); });
    simulation.on_preparation();
  }
  sg4::Engine::on_time_advance_cb([&simulation](double) { simulation.on_time(); });
  engine.run();
  // Taking the simulator apart would take longer than some simulations.
  std::fflush(stdout);
  std::_Exit(kOk);
}

}  // namespace
}  // namespace treeattn::tools

int main(int argc, char** argv) {
  using namespace treeattn;
  try {
    return tools::run(argc, argv);
  } catch (const InvalidArgument& error) {
    return tools::fail(error, tools::kBadUsage);
  } catch (const BadFile& error) {
    return tools::fail(error, tools::kBadUsage);
  } catch (const std::bad_alloc&) {
    return tools::fail_no_memory();
  } catch (const std::exception& error) {
    return tools::fail(error, tools::kCheckFailed);
  }
}
