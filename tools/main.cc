// SPDX-License-Identifier: Apache-2.0
// The `treeattn` command: finds the subcommand, runs it, and turns what it throws into an exit code.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

#include "command.h"
#include "command_line.h"
#include "launched_ranks.h"
#include "no_memory.h"
#include "notes.h"
#include "treeattn/communicator.h"
#include "treeattn/error.h"
#include "treeattn/version.h"

namespace treeattn::tools {
namespace {

constexpr char kFooter[] = R"(Examples:
  treeattn info                                   what this machine is and how fast it reads memory
  treeattn verify                                 check every kernel against a double-precision reference
  treeattn bench attention --quick                a first look at the speed
  treeattn bench attention --heads 32 --kv-heads 8 --dtype bf16 --tokens 128k
  treeattn bench attention --device cuda          the same on a GPU
  treeattn bench decode --ranks 4                 tree against ring over four ranks
  mpirun -n 4 treeattn bench decode               the same over processes; torchrun --no-python does, too
  treeattn simulate --ranks 128                   the same on a cluster that is not there
  treeattn plan --context 1M                      how many devices a Llama 3.1 8B wants, and how fast
  treeattn reproduce latency                      a result of the paper beside ours
  treeattn demo                                   a pass key found in a long text over four ranks
  treeattn generate --model DIR "The sea is"      text from a Llama; chat: a conversation
  treeattn bench llama --random-weights llama-3.2-1b --ranks 2

Every subcommand has its own --help, with examples.

Environment:
  TREEATTN_ISA    the instruction set to use instead of the best one; `treeattn info` lists them
  TREEATTN_NODES  as 0,0,1,1: which node each rank is taken to be on
  TREEATTN_JOB    the same text for all processes of one run that connect by TCP: one that an earlier run has left, with
                  another text, is refused (default: what torchrun or Slurm call the job)

Exit codes:
  0  all is well
  1  a check failed, or something went wrong inside
  2  bad usage or bad input
  3  something asked for is not on this machine (instruction set, device, memory)
  4  a rank was lost
What a signal ends, as Ctrl-C does, has 128 and its number in a shell: 130.)";

int fail(std::string_view message, int code) {
  print_note("treeattn: {}\n", message);
  return code;
}

// For what goes wrong on this process alone. Others of a launcher still count on it: to end as usual is to wait for
// them in MPI_Finalize while they wait for an answer.
int fail_alone(const std::string& message, int code) {
  if (!launched()) return fail(message, code);
  std::fflush(stdout);
  std::_Exit(fail(fmt::format("rank {}: {}", launch_rank(), message), code));
}

// For what goes wrong on every process alike: said once.
int fail_once(const char* message, int code) {
  if (launch_rank() == 0) return fail(message, code);
  // A launcher ends all processes when one has failed: the one that speaks must not be cut off. Who is still there then
  // may be the only one that failed, as where a file is missing on its machine.
  std::this_thread::sleep_for(std::chrono::seconds(met_other_ranks ? 1 : 3));
  return met_other_ranks ? code : fail(fmt::format("rank {}: {}", launch_rank(), message), code);
}

// Every survivor knows who is gone; the first of them says so, and whoever was given up itself.
int fail_lost(const LostRanks& error) {
  int first = 0;
  bool given_up = false;
  for (const int rank : error.lost_so_far()) {
    first += rank == first ? 1 : 0;
    given_up = given_up || rank == launch_rank();
  }
  const bool quiet = launched() && !given_up && launch_rank() != first;
  return quiet ? kLostRanks : fail(error.what(), kLostRanks);
}

// The number of a standard stream that was closed would go to the next file that is opened, and what is printed into
// that file. A stream that cannot be used holds its place: it can be read where one writes, and the other way round.
void hold_closed_streams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(stream, F_GETFD) < 0) ::open("/dev/null", stream == STDIN_FILENO ? O_WRONLY : O_RDONLY);
  }
}

// Weights lie in mapped files, messages of MPI in shared ones, and no call says that one was cut meanwhile or has no
// room: the touch of what is not there does. Whoever has other plans with the signal, such as a sanitizer, keeps them.
void explain_bus_error() {
  struct sigaction action {};
  if (::sigaction(SIGBUS, nullptr, &action) != 0 || action.sa_handler != SIG_DFL) return;
  action.sa_flags = SA_RESETHAND;  // the touch comes again when the handler returns, and ends the process
  action.sa_handler = [](int) {
    constexpr std::string_view kText =
        "treeattn: a file of the model was cut while it was in use, its disk failed, or /dev/shm is full\n";
    if (::write(STDERR_FILENO, kText.data(), kText.size()) < 0) {
      // Nobody listens.
    }
  };
  ::sigaction(SIGBUS, &action, nullptr);
}

constexpr char kNoOutput[] = "standard output cannot be written";

// What was printed may still lie in a buffer, and the disk may be full: then it is lost, and nobody may believe
// otherwise.
int after_printing(int code) {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
  return fail(kNoOutput, code == kOk ? kCheckFailed : code);
}

int run(int argc, char** argv) {
  CommandLine app("Exact tree attention: facts, checks, benchmarks and text.", "treeattn",
                  fmt::format("treeattn {}", kVersion));
  app.footer(kFooter);
  app.require_subcommand();

  CommandLine* bench = app.add_subcommand("bench", "Measure speed, next to what the machine could do at best");
  bench->require_subcommand();
  bench->footer(
      "Examples:\n  treeattn bench attention --quick\n  treeattn bench decode --quick\n"
      "  treeattn bench llama --random-weights llama-3.2-1b --quick");

  const std::vector<Command> commands = {add_info(app),
                                         add_verify(app),
                                         add_demo(app),
                                         add_generate(app),
                                         add_chat(app),
                                         add_plan(app),
                                         add_simulate(app),
                                         add_reproduce(app),
                                         add_report(app),
                                         add_bench_attention(*bench),
                                         add_bench_decode(*bench),
                                         add_bench_llama(*bench)};
  if (const std::optional<std::string> text = app.parse(argc, argv)) {
    if (launch_rank() == 0) fmt::print("{}", *text);
    return kOk;
  }
  for (const Command& command : commands) {
    if (command.app->parsed()) return command.run();
  }
  return kBadUsage;
}

}  // namespace
}  // namespace treeattn::tools

int main(int argc, char** argv) {
  using namespace treeattn;
  tools::hold_closed_streams();
  tools::explain_bus_error();
  std::signal(SIGXFSZ, SIG_IGN);  // a file that may not grow (ulimit -f) is then refused as one on a full disk is
  try {
    return tools::after_printing(tools::run(argc, argv));
  } catch (const InvalidArgument& error) {
    return tools::fail_once(error.what(), tools::kBadUsage);
  } catch (const BadFile& error) {
    return tools::fail_once(error.what(), tools::kBadUsage);
  } catch (const Unavailable& error) {
    return tools::fail_once(error.what(), tools::kUnavailable);
  } catch (const LostRanks& error) {
    return tools::fail_lost(error);
  } catch (const std::bad_alloc&) {
    return tools::fail_alone(tools::no_memory_text(), tools::kUnavailable);
  } catch (const std::system_error& error) {
    // fmt's, who does not say which file, and may give a reason that others give for want of threads.
    if (std::ferror(stdout) != 0) return tools::fail_alone(tools::kNoOutput, tools::kCheckFailed);
    const bool threads = error.code() == std::errc::resource_unavailable_try_again;
    return threads ? tools::fail_alone(tools::no_threads_text(), tools::kUnavailable)
                   : tools::fail_alone(error.what(), tools::kCheckFailed);
  } catch (const std::exception& error) {
    return tools::fail_alone(error.what(), tools::kCheckFailed);
  }
}
