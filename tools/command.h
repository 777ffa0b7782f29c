// SPDX-License-Identifier: Apache-2.0
// What a subcommand of `treeattn` is: an entry in the command line's grammar and a function that returns the exit code.
#pragma once

#include <functional>

namespace CLI {
class App;
}

namespace treeattn::tools {

// Documented in --help and in docs/cli.md.
inline constexpr int kOk = 0;
inline constexpr int kCheckFailed = 1;
inline constexpr int kBadUsage = 2;
inline constexpr int kUnavailable = 3;
inline constexpr int kLostRanks = 4;

struct Command {
  CLI::App* app = nullptr;   // owned by the parent it was added to
  std::function<int()> run;  // called after parsing, when app->parsed()
};

// One per file, named like the command.
Command add_info(CLI::App& parent);
Command add_verify(CLI::App& parent);
Command add_bench_attention(CLI::App& parent);
Command add_bench_decode(CLI::App& parent);
Command add_simulate(CLI::App& parent);
Command add_plan(CLI::App& parent);
Command add_reproduce(CLI::App& parent);
Command add_report(CLI::App& parent);
Command add_generate(CLI::App& parent);
Command add_chat(CLI::App& parent);
Command add_bench_llama(CLI::App& parent);
Command add_demo(CLI::App& parent);

}  // namespace treeattn::tools
