// SPDX-License-Identifier: Apache-2.0
// treeattn reproduce: the paper's results, each by one command, beside ours.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "base/check.h"
#include "child_process.h"
#include "command.h"
#include "experiments.h"
#include "files.h"
#include "json_line.h"
#include "notes.h"
#include "option_errors.h"
#include "progress.h"
#include "simulation_job.h"
#include "svg_chart.h"
#include "table.h"

namespace treeattn::tools {
namespace {

struct ReproduceOptions {
  std::vector<std::string> names;
  std::string out, simulator;
  bool list = false, json = false, quick = false, closed_form = false;
};

void print_list(bool json) {
  Table table({{"name", Align::kLeft}, {"what", Align::kLeft}});
  for (const Experiment& experiment : all_experiments()) {
    if (json) {
      const nlohmann::ordered_json line = {
          {"name", experiment.name}, {"title", experiment.title}, {"paper", experiment.paper}};
      fmt::print("{}\n", json_line(line));
    }
    table.add({std::string(experiment.name), std::string(experiment.title)});
  }
  if (!json) table.print();
}

void print_table(const DataTable& data) {
  fmt::print("\n{}\n", data.title);
  std::vector<Column> columns;
  for (const std::string& title : data.columns) columns.push_back({title});
  Table table(columns);
  for (const auto& row : data.rows) table.add(row);
  table.print();
}

void print_text(const Outcome& outcome) {
  fmt::print("{}\n{}\nPaper: {}\n", outcome.title, std::string(outcome.title.size(), '='), outcome.paper);
  for (const DataTable& table : outcome.tables) print_table(table);
  if (!outcome.comparisons.empty()) fmt::print("\n");
  for (const Comparison& c : outcome.comparisons) {
    fmt::print("{}: paper {}, ours {} {} ({}), ratio {}\n    {}\n", c.what, short_number(c.paper), short_number(c.ours),
               c.unit, source_name(c.source), short_number(c.ours / c.paper), c.why);
  }
  if (!outcome.notes.empty()) fmt::print("\n");
  for (const std::string& note : outcome.notes) fmt::print("{}\n", note);
  if (!outcome.targets.empty()) fmt::print("\n");
  for (const Target& target : outcome.targets) {
    fmt::print("{}  {}: {} ({})\n", target.holds ? "holds " : "FAILED", target.what, short_number(target.value),
               target.wanted);
  }
  fmt::print("\n");
  std::fflush(stdout);
}

void write_json(const std::filesystem::path& file, const Outcome& outcome) {
  write_text(file, to_json(outcome).dump(1) + "\n");
}

std::vector<const Experiment*> chosen(const ReproduceOptions& options) {
  std::vector<const Experiment*> out;
  bool all = false;
  for (const std::string& name : options.names) {
    if (name == "all") {
      all = true;
    } else {
      out.push_back(&find_experiment(name));
    }
  }
  if (!all) return out;
  out.clear();
  for (const Experiment& experiment : all_experiments()) out.push_back(&experiment);
  return out;
}

// Built where SimGrid is.
std::filesystem::path simulator(const ReproduceOptions& options) {
  base::require(!options.closed_form || options.simulator.empty(),
                "--simulator with --closed-form; accepted: one of them");
  if (options.closed_form) return {};
  const std::filesystem::path program =
      options.simulator.empty() ? program_folder() / kSimulator : std::filesystem::path(options.simulator);
  if (::access(program.c_str(), X_OK) == 0 && !std::filesystem::is_directory(program)) return program;
  base::require(options.simulator.empty(), "--simulator is \"{}\"; accepted: the program treeattn-sim",
                options.simulator);
  print_note("note: there is no {}; times are those of the closed form\n", program.string());
  return {};
}

int run(const ReproduceOptions& options) {
  if (options.list) {
    base::require(options.names.empty(), "--list with \"{}\"; accepted: one of them", fmt::join(options.names, " "));
    print_list(options.json);
    return kOk;
  }
  base::require(!options.names.empty(), "no experiment is named; accepted: names of treeattn reproduce --list, or all");
  const std::vector<const Experiment*> experiments = chosen(options);
  if (!options.out.empty()) inside_option("--out", [&] { make_directory(options.out); });
  std::size_t begun = 0;
  Progress progress("reproduce", experiments.size());
  DecodeTimes times(simulator(options), [&](const std::string& what) {
    progress.at(begun, fmt::format("{}: {}", experiments[begun - 1]->name, what));
  });
  ExperimentContext context{times, options.quick};
  bool failed = false;
  std::size_t skipped = 0;
  for (const Experiment* experiment : experiments) {
    progress.at(++begun, std::string(experiment->name));
    Outcome outcome;
    try {
      outcome = run_experiment(*experiment, context);
    } catch (const Unavailable& error) {
      if (experiments.size() == 1) throw;
      progress.clear();
      print_note("skipped {}: {}\n", experiment->name, error.what());
      ++skipped;
      continue;
    }
    progress.clear();
    if (options.json) {
      fmt::print("{}\n", json_line(to_json(outcome)));
    } else {
      print_text(outcome);
    }
    if (!options.out.empty()) write_json(std::filesystem::path(options.out) / (outcome.name + ".json"), outcome);
    for (const Target& target : outcome.targets) failed = failed || !target.holds;
  }
  if (skipped == experiments.size()) return kUnavailable;
  return failed ? kCheckFailed : kOk;
}

constexpr char kFooter[] =
    R"(Times are simulated as by `treeattn simulate`; with --closed-form, or where the ranks are too many to simulate,
from the cost model. Memory and volume are measured here. Every figure says which. The exit code is 1 when a target is
missed.

Examples:
  treeattn reproduce --list
  treeattn reproduce latency                       tree against ring, 80k to 5.12M tokens
  treeattn reproduce memory                        needs about 5 GB
  treeattn reproduce all --out data && treeattn report --data data --out report.html)";

}  // namespace

Command add_reproduce(CommandLine& parent) {
  CommandLine* app = parent.add_subcommand("reproduce", "The paper's results beside ours, and what goes beyond them");
  auto options = std::make_shared<ReproduceOptions>();
  app->add_option("names", options->names, "Experiments, or all")->type_name("NAME");
  app->add_option("--out", options->out, "Also write the data as JSON into this directory")->type_name("DIR");
  app->add_option("--simulator", options->simulator,
                  "The program that simulates (default: treeattn-sim beside this one)")
      ->type_name("FILE");
  app->add_flag("--closed-form", options->closed_form, "No simulation: times by the cost model");
  app->add_flag("--quick", options->quick, "Smaller sizes, for a first look");
  app->add_flag("--list", options->list, "The experiments there are");
  app->add_flag("--json", options->json, "One JSON object an experiment; docs/cli.md explains the keys");
  app->footer(kFooter);
  return {app, [options] { return run(*options); }};
}

}  // namespace treeattn::tools
