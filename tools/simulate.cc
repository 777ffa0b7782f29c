// SPDX-License-Identifier: Apache-2.0
// treeattn simulate: one decoding step on a cluster that is not there. Checks the options, starts the simulator, and
// prints what it says.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/available_memory.h"
#include "base/check.h"
#include "child_process.h"
#include "command.h"
#include "json_line.h"
#include "notes.h"
#include "option_errors.h"
#include "options.h"
#include "plan/cluster.h"
#include "plan/tree_order.h"
#include "progress.h"
#include "scenario.h"
#include "simulation_job.h"
#include "table.h"
#include "treeattn/state.h"

namespace treeattn::tools {
namespace {

constexpr int kMostRanks = 65536;
// More takes long: every rank sends ranks - 1 messages.
constexpr int kMostRingRanks = 1024;
// Of the simulator's own: gather keeps the states of all ranks on every rank.
constexpr double kMostGatherBytes = 6e8;
// Of its own states that a rank holds at the same time, at most, beside messages.
constexpr double kCopiesOfStates = 4;
// Of K and V on a rank. More than any device has, and less than what the simulator cannot map.
constexpr std::size_t kMostShare = std::size_t{1} << 40;

struct SimulateOptions {
  ShapeOptions shape;
  std::string cluster = "dgx-h100";
  std::string ranks, ranks_per_node, strategy, branches, overhead_us, slow_rank, print_cluster;
  bool free_order = false;
  bool json = false;
  bool csv = false;
};

double parse_overhead(const std::string& text) {
  if (text.empty()) return 0;
  const std::optional<double> value = parse_number(text);
  base::require(value && *value >= 0 && *value <= 1e12, "--overhead-us is \"{}\"; accepted: microseconds, 0 to 1e12",
                text);
  return *value * 1e-6;
}

// "3:2.5,7:2" as lines of a cluster file.
std::string slow_rank_lines(const std::string& text, int ranks) {
  std::string out;
  std::set<std::int64_t> seen;
  for (const std::string& item : text.empty() ? std::vector<std::string>() : split_list(text)) {
    const std::size_t colon = item.find(':');
    base::require(colon != std::string::npos,
                  "--slow-rank is \"{}\"; accepted: RANK:FACTOR, or several with commas between them", text);
    const std::int64_t rank = parse_count("the RANK of --slow-rank", item.substr(0, colon), 0, ranks - 1);
    base::require(seen.insert(rank).second, "--slow-rank has rank {} twice; accepted: one factor for a rank", rank);
    const std::optional<double> factor = parse_number(item.substr(colon + 1));
    base::require(factor && *factor > 0 && *factor <= plan::kMostFactor,
                  "--slow-rank is \"{}\"; accepted: RANK:FACTOR, the factor more than 0, up to {}", item,
                  plan::kMostFactor);
    out += fmt::format("slow_device = {} {}\n", rank, item.substr(colon + 1));
  }
  return out;
}

std::vector<Strategy> strategies_of(const std::string& text) {
  if (text.empty()) return {std::begin(kAllStrategies), std::end(kAllStrategies)};
  std::vector<std::string_view> accepted;
  for (const Strategy strategy : kAllStrategies) accepted.push_back(strategy_name(strategy));
  for (const std::string& name : split_list(text)) {
    base::require(std::find(accepted.begin(), accepted.end(), name) != accepted.end(),
                  "--strategy is \"{}\"; accepted: {} (auto measures real links)", name, fmt::join(accepted, ", "));
  }
  return parse_strategies(text);
}

// One job for each number of ranks and each shape; lengths go together.
std::vector<SimulationJob> make_jobs(const SimulateOptions& options) {
  SimulationJob job;
  std::vector<int> rank_counts;
  for (const std::string& text : split_list(options.ranks.empty() ? "128" : options.ranks)) {
    rank_counts.push_back(static_cast<int>(parse_count("--ranks", text, 1, kMostRanks)));
  }
  const int most_ranks = *std::max_element(rank_counts.begin(), rank_counts.end());
  const std::string slow = slow_rank_lines(options.slow_rank, most_ranks);
  job.origin = slow.empty() ? options.cluster : options.cluster + " with --slow-rank";
  const plan::Cluster cluster = inside_option("--cluster", [&] {
    job.cluster = plan::cluster_text(options.cluster) + "\n" + slow;
    return plan::parse_cluster(job.cluster, job.origin);
  });
  job.strategies = strategies_of(options.strategy);
  job.canonical = !options.free_order;
  job.overhead_s = parse_overhead(options.overhead_us);
  ShapeOptions shape_options = options.shape;
  if (shape_options.tokens.empty()) shape_options.tokens = "5120000";
  const std::vector<Shape> shapes = shape_options.shapes();
  std::vector<SimulationJob> jobs;
  for (const int ranks : rank_counts) {
    job.ranks = ranks;
    const int devices = cluster.devices_per_node;
    job.ranks_per_node = options.ranks_per_node.empty()
                             ? std::min(devices, job.ranks)
                             : static_cast<int>(parse_count("--ranks-per-node", options.ranks_per_node, 1, devices));
    job.branches = parse_branches(options.branches, plan::branches_for(job.ranks));
    const Shape* last = nullptr;
    for (const Shape& shape : shapes) {
      if (last == nullptr || last->kv_heads != shape.kv_heads || last->dtype != shape.dtype) {
        jobs.push_back(job);
        jobs.back().shape = shape;
      }
      const std::size_t share = shape.cache_bytes() / static_cast<std::size_t>(job.ranks);
      base::require(share <= kMostShare, "--tokens {} on {}: {} of K and V a rank; accepted: at most {}", shape.tokens,
                    format_count(job.ranks, "rank"), format_bytes(share), format_bytes(kMostShare));
      jobs.back().tokens.push_back(shape.tokens);
      last = &shape;
    }
  }
  return jobs;
}

// SimGrid gives a rank a stack and a guard before it. Where there are no mappings for them it aborts, and only when
// the cluster is built.
void require_mappings(const SimulationJob& job) {
  constexpr std::int64_t kOthers = 1000;  // libraries and memory
  std::int64_t most = 0;
  std::ifstream("/proc/sys/vm/max_map_count") >> most;
  if (most == 0 || 2 * std::int64_t{job.ranks} + kOthers <= most) return;
  throw Unavailable(fmt::format(
      "--ranks is {}: the simulator needs two memory mappings for each, and this system gives a process {}; accepted "
      "here: up to {}, or more where sysctl vm.max_map_count is",
      job.ranks, most, std::max<std::int64_t>(1, (most - kOthers) / 2)));
}

// States are real. Those of all ranks are there at the same time, and so may be all messages: at most so many bytes.
double bytes_of_states(const SimulationJob& job, Strategy strategy, double block) {
  Scenario scenario(job);
  scenario.choose(strategy, job.tokens.front());
  std::size_t blocks = 0;
  for (int rank = 0; rank < job.ranks; ++rank) blocks += scenario.shares().nodes_of(rank).size();
  return kCopiesOfStates * block * static_cast<double>(blocks) + static_cast<double>(scenario.closed_form().bytes);
}

// What would take too long or too much memory is left out, and that is said.
void leave_out(SimulationJob& job, bool asked_for_all) {
  const Shape& shape = job.shape;
  const double block = static_cast<double>(shape.batch * shape.queries * shape.heads) *
                       static_cast<double>(state_floats(shape.head_dim)) * sizeof(float);
  const auto text = [](double bytes) { return format_bytes(static_cast<std::size_t>(std::min(bytes, 0x1p63))); };
  std::erase_if(job.strategies, [&](Strategy strategy) {
    if (strategy == Strategy::kGather && block * job.ranks * job.ranks > kMostGatherBytes) {
      print_note("skipped gather on {} ranks: the simulator would hold {} of states\n", job.ranks,
                 text(block * job.ranks * job.ranks));
      return true;
    }
    if (strategy == Strategy::kRing && asked_for_all && job.ranks > kMostRingRanks) {
      print_note("skipped ring on {} ranks: {} messages take long; --strategy ring does it\n", job.ranks,
                 static_cast<std::int64_t>(job.ranks) * (job.ranks - 1));
      return true;
    }
    if (strategy == Strategy::kRing) return false;  // passes K and V, which have no memory
    const std::optional<std::size_t> room = base::available_memory();
    const double needed = bytes_of_states(job, strategy, block);
    if (!room || needed <= static_cast<double>(*room)) return false;
    print_note("skipped {} on {}: the simulator may hold {} of states, {} of memory can be used\n",
               strategy_name(strategy), format_count(job.ranks, "rank"), text(needed), format_bytes(*room));
    return true;
  });
}

class Report {
 public:
  Report(const SimulateOptions& options, const SimulationJob& job)
      : options_(options), job_(job), cluster_(plan::parse_cluster(job.cluster, job.origin)) {}

  void add(const SimulationLine& line) {
    lines_.push_back(line);
    if (!line.failure.empty()) {
      print_note("treeattn: check failed: {}: {}\n", strategy_name(line.strategy), line.failure);
      failed_ = true;
    }
    if (options_.json) fmt::print("{}\n", json_line(values(line)));
    if (options_.csv) print_csv(line);
    std::fflush(stdout);
  }

  void print_table() const {
    if (options_.json || options_.csv || lines_.empty()) return;
    const Shape& shape = job_.shape;
    fmt::print("{}: {}, {} a node; {}/{} heads of {}, {}", cluster_.name, format_count(job_.ranks, "rank"),
               job_.ranks_per_node, shape.heads, shape.kv_heads, shape.head_dim, dtype_name(shape.dtype));
    if (shape.batch > 1) fmt::print(", {} sequences", shape.batch);
    if (shape.queries > 1) fmt::print(", {} queries", shape.queries);
    if (job_.overhead_s > 0) fmt::print(", {} us of overhead", format_number(1e6 * job_.overhead_s));
    fmt::print("\n\n");
    Table table({{"tokens"},
                 {"strategy", Align::kLeft},
                 {"us"},
                 {"local us"},
                 {"reduce us"},
                 {"steps"},
                 {"sent"},
                 {"closed form"},
                 {"simulated/closed"},
                 {"device memory"},
                 {"ring/this"}});
    for (const SimulationLine& line : lines_) table.add(cells(line));
    table.print();
    fmt::print("\n");
  }

  bool failed() const { return failed_; }

 private:
  double reduce_us(const SimulationLine& line) const {
    return std::max(0.0, line.us - line.local_us - 1e6 * job_.overhead_s);
  }
  double sent(const SimulationLine& line) const { return static_cast<double>(line.bytes) / job_.ranks; }
  bool fits(const SimulationLine& line) const {
    return static_cast<double>(line.device_bytes) <= cluster_.device_memory_bytes;
  }

  nlohmann::ordered_json values(const SimulationLine& line) const {
    nlohmann::ordered_json out;
    out["ranks"] = job_.ranks;
    out["ranks_per_node"] = job_.ranks_per_node;
    out["strategy"] = strategy_name(line.strategy);
    out["tokens"] = line.tokens;
    out["heads"] = job_.shape.heads;
    out["kv_heads"] = job_.shape.kv_heads;
    out["head_dim"] = job_.shape.head_dim;
    out["us"] = line.us;
    out["local_us"] = line.local_us;
    out["reduce_us"] = reduce_us(line);
    out["steps"] = line.steps;
    out["bytes_per_rank"] = per_rank(line.bytes, job_.ranks);
    out["closed_form_us"] = line.closed_form_us;
    out["cluster"] = cluster_.name;
    out["dtype"] = dtype_name(job_.shape.dtype);
    out["batch"] = job_.shape.batch;
    out["queries"] = job_.shape.queries;
    out["branches"] = job_.branches;
    out["canonical"] = job_.canonical;
    out["overhead_us"] = 1e6 * job_.overhead_s;
    out["messages"] = line.messages;
    out["remote_bytes"] = line.remote_bytes;
    out["device_bytes"] = line.device_bytes;
    out["fits"] = fits(line);
    out["wall_s"] = line.wall_s;
    return out;
  }

  // No value has a comma or a quote in it but a cluster's name, which is the user's.
  void print_csv(const SimulationLine& line) const {
    std::string head, row;
    const nlohmann::ordered_json all = values(line);
    for (const auto& [key, value] : all.items()) {
      head += (head.empty() ? "" : ",") + key;
      row += (row.empty() ? "" : ",") + (value.is_string() ? quoted(value.get<std::string>()) : value.dump());
    }
    if (!std::exchange(csv_begun_, true)) fmt::print("{}\n", head);
    fmt::print("{}\n", row);
  }

  static std::string quoted(const std::string& text) {
    if (text.find_first_of(",\"") == std::string::npos) return text;
    std::string out = "\"";
    for (const char c : text) out += c == '"' ? "\"\"" : std::string(1, c);
    return out + "\"";
  }

  std::vector<std::string> cells(const SimulationLine& line) const {
    const auto ring = std::find_if(lines_.begin(), lines_.end(), [&](const SimulationLine& other) {
      return other.strategy == Strategy::kRing && other.tokens == line.tokens;
    });
    return {fmt::format("{}", line.tokens),
            std::string(strategy_name(line.strategy)),
            format_number(line.us),
            format_number(line.local_us),
            format_number(reduce_us(line)),
            fmt::format("{}", line.steps),
            format_bytes(static_cast<std::size_t>(sent(line))),
            format_number(line.closed_form_us),
            fmt::format("{:.3f}", line.us / line.closed_form_us),
            format_bytes(line.device_bytes) + (fits(line) ? "" : " (too much)"),
            ring == lines_.end() ? "-" : format_number(ring->us / line.us)};
  }

  static inline bool csv_begun_ = false;
  const SimulateOptions& options_;
  const SimulationJob& job_;
  plan::Cluster cluster_;
  std::vector<SimulationLine> lines_;
  bool failed_ = false;
};

// "[########............] 40 %  ring on 1024 ranks"
std::string bar(double fraction, const std::string& what) {
  constexpr int kWidth = 20;
  const int full = static_cast<int>(fraction * kWidth);
  return fmt::format("[{:#>{}}{:.>{}}] {:.0f} %  {}", "", full, "", kWidth - full, 100 * fraction, what);
}

int run_job(const std::filesystem::path& simulator, const SimulateOptions& options, const SimulationJob& job) {
  Report report(options, job);
  const std::size_t total = job.strategies.size() * job.tokens.size();
  std::size_t done = 0;
  Progress progress("simulating", total);
  const int code = run_child(simulator, job.to_json(), [&](const std::string& text) {
    if (!text.starts_with('{')) {  // how far the strategy has come, 0 to 1
      const double part = std::strtod(text.c_str(), nullptr);
      const std::string_view name = strategy_name(job.strategies[done % job.strategies.size()]);
      progress.at(done, bar((static_cast<double>(done) + part) / static_cast<double>(total),
                            fmt::format("{} on {} ranks", name, job.ranks)));
      return;
    }
    ++done;
    progress.clear();
    report.add(SimulationLine::from_json(text));
  });
  progress.clear();
  report.print_table();
  return code != kOk ? code : report.failed() ? kCheckFailed : kOk;
}

int run(const SimulateOptions& options) {
  if (!options.print_cluster.empty()) {
    base::require(!options.json && !options.csv, "--print-cluster with {}; accepted: without, as it prints a file",
                  options.json ? "--json" : "--csv");
    fmt::print("{}", with_option("--print-cluster", options.print_cluster,
                                 [&] { return plan::built_in_cluster_text(options.print_cluster); }));
    return kOk;
  }
  base::require(!options.json || !options.csv, "--json with --csv; accepted: one of them");
  std::vector<SimulationJob> jobs = make_jobs(options);
  const std::filesystem::path simulator = program_folder() / kSimulator;
  if (!std::filesystem::exists(simulator)) {
    throw Unavailable(
        fmt::format("simulate needs {}, which is built where SimGrid is: install the Debian package libsimgrid-dev and "
                    "build again",
                    simulator.string()));
  }
  for (const SimulationJob& job : jobs) require_mappings(job);
  int worst = kOk;
  bool any = false;
  for (SimulationJob& job : jobs) {
    leave_out(job, options.strategy.empty());
    if (job.strategies.empty()) continue;
    any = true;
    worst = std::max(worst, run_job(simulator, options, job));
  }
  return any ? worst : kUnavailable;
}

constexpr char kFooter[] = R"(The library's own transport, reducers and ring run on a simulated network (SimGrid);
the devices are modelled: attention takes bytes / rate + launch, K and V have no memory.
docs/simulation.md has the model, the format of a cluster file, and what was seen.

Columns:
  us                one decoding step, until the last rank has the result
  local us          the slowest rank's attention to what it carries; ring: to all there is
  reduce us         the rest, --overhead-us apart
  sent              bytes a rank sends, on average
  closed form       the cost model's microseconds for the same; slow and shared links are not in it
  device memory     what the largest rank holds

Examples:
  treeattn simulate                                       the paper's largest case: 128 GPUs, 5.12M tokens
  treeattn simulate --ranks 8,64,128 --tokens 80000,5120000 --strategy paper,butterfly,ring
  treeattn simulate --overhead-us 119000 --strategy paper,ring
  treeattn simulate --cluster rtx4090 --ranks 2 --tokens 32000 --heads 32 --kv-heads 8 --head-dim 64
  treeattn simulate --ranks 100 --slow-rank 17:3 --json
  treeattn simulate --print-cluster mi300x > mine.cluster; treeattn simulate --cluster mine.cluster --ranks 16)";

}  // namespace

Command add_simulate(CommandLine& parent) {
  CommandLine* app =
      parent.add_subcommand("simulate", "A decoding step on a cluster that is not there, up to thousands of ranks");
  auto options = std::make_shared<SimulateOptions>();
  options->shape.add_to(*app, "5120000");
  const auto text = [&](const char* name, std::string& value, const char* what, const char* type) {
    app->add_option(name, value, what)->type_name(type);
  };
  text("--cluster", options->cluster, "dgx-h100, mi300x, rtx4090, or a file (default dgx-h100)", "NAME");
  text("--ranks", options->ranks, "Devices, or a list (default 128)", "LIST");
  text("--ranks-per-node", options->ranks_per_node, "Ranks on a node (default: as many as it has devices)", "N");
  text("--strategy", options->strategy,
       "paper two_phase merge butterfly gather two_level ring, or a list (default: all)", "LIST");
  text("--branches", options->branches,
       "Leaves of the reduction tree (default 256, or ranks rounded up to a power of 2)", "N");
  text("--overhead-us", options->overhead_us, "Added to every call, as a slow caller would (default 0)", "US");
  text("--slow-rank", options->slow_rank, "A rank whose local work takes FACTOR times as long", "RANK:FACTOR");
  text("--print-cluster", options->print_cluster, "Prints a built-in cluster as a file to start from", "NAME");
  app->add_flag("--free-order", options->free_order, "Without the canonical order: one state a rank, other bits");
  app->add_flag("--json", options->json, "One JSON object a line; docs/cli.md explains the keys");
  app->add_flag("--csv", options->csv, "The same keys as comma-separated values");
  app->footer(kFooter);
  return {app, [options] { return run(*options); }};
}

}  // namespace treeattn::tools
