// SPDX-License-Identifier: Apache-2.0
// What a subcommand of `treeattn` is: an entry in the command line's grammar and a function that returns the exit code.
#pragma once

#include <functional>

#include "command_line.h"

namespace treeattn::tools {

// Documented in --help and in docs/cli.md.
inline constexpr int kOk = 0;
inline constexpr int kCheckFailed = 1;
inline constexpr int kBadUsage = 2;
inline constexpr int kUnavailable = 3;
inline constexpr int kLostRanks = 4;

// Whether this process has met the others of a launcher: from then on they fail together, and the first one
// speaks.
inline bool met_other_ranks = false;

struct Command {
  CommandLine* app = nullptr;  // owned by the parent it was added to
  std::function<int()> run;    // called after parsing, when app->parsed()
};

// One per file, named like the command.
Command add_info(CommandLine& parent);
Command add_verify(CommandLine& parent);
Command add_bench_attention(CommandLine& parent);
Command add_bench_decode(CommandLine& parent);
Command add_simulate(CommandLine& parent);
Command add_plan(CommandLine& parent);
Command add_reproduce(CommandLine& parent);
Command add_report(CommandLine& parent);
Command add_generate(CommandLine& parent);
Command add_chat(CommandLine& parent);
Command add_bench_llama(CommandLine& parent);
Command add_demo(CommandLine& parent);

}  // namespace treeattn::tools
