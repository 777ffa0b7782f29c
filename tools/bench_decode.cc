// SPDX-License-Identifier: Apache-2.0
// treeattn bench decode: one decoding step over a cache that is spread over ranks, by Tree Attention's strategies and
// by Ring Attention, side by side. The ranks are the processes of a launcher, or else threads.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/round_up.h"
#include "command.h"
#include "decode_run.h"
#include "device_option.h"
#include "json_line.h"
#include "launched_ranks.h"
#include "link_option.h"
#include "notes.h"
#include "options.h"
#include "parallel/choose_link.h"
#include "table.h"
#include "treeattn/attention.h"
#include "treeattn/error.h"
#include "treeattn/thread_pool.h"

namespace treeattn::tools {
namespace {

struct BenchDecodeOptions {
  const CommandLine* command = nullptr;
  ShapeOptions shape;
  std::string device, link, ranks, strategy, threads, repeat, seed, deadline, placement, branches, chunk;
  bool quick = false;
  bool free_order = false;
  bool json = false;
  bool why = false;
};

// What the options say, checked.
struct Plan {
  std::vector<Shape> shapes;
  std::vector<Strategy> strategies;
  ReductionOrder order;
  RankOptions ranks;
  Device device;
  DeviceLink link = DeviceLink::kHost;
  int rank_count = 0;  // 0: not given
  int threads = 0;     // 0: not given
  int repeat = 0;
  std::uint64_t seed = 1;
  bool canonical = true;
  bool quick = false;
};

std::vector<Strategy> every_strategy() {
  std::vector<Strategy> out(std::begin(kAllStrategies), std::end(kAllStrategies));
  out.push_back(Strategy::kAuto);
  return out;
}

Plan make_plan(const BenchDecodeOptions& options) {
  Plan plan;
  plan.device = parse_device(options.device);
  plan.link = parse_link(options.link, plan.device.on_gpu());
  ShapeOptions shape = options.shape;
  if (shape.tokens.empty()) shape.tokens = options.quick ? "16k" : "128k";
  plan.shapes = shape.shapes();
  plan.strategies = options.strategy.empty() ? every_strategy() : parse_strategies(options.strategy);
  plan.order = parse_order(options.chunk, options.branches);
  base::require(options.placement.empty() || options.placement == "cyclic" || options.placement == "contiguous",
                "--placement is \"{}\"; accepted: cyclic, contiguous", options.placement);
  if (options.placement == "contiguous") plan.order.placement = Placement::kContiguous;
  plan.ranks.deadline = parse_deadline(options.deadline, kDefaultDeadline);
  plan.rank_count = parse_count_or("--ranks", options.ranks, 1, 1024, 0);
  plan.threads = parse_count_or("--threads", options.threads, 1, 4096, 0);
  plan.repeat = parse_count_or("--repeat", options.repeat, 1, 100000, 0);
  plan.seed = static_cast<std::uint64_t>(parse_count_or("--seed", options.seed, 0, 1 << 30, 1));
  base::require(
      !options.free_order || plan.link != DeviceLink::kPeer,
      "--free-order with --link peer; accepted: with host or nccl, as kernels of that link merge along the tree");
  plan.canonical = !options.free_order;
  plan.quick = options.quick;
  return plan;
}

// cores: that a rank has for itself.
DecodeSetup setup_for(const Plan& plan, const Shape& shape, int cores) {
  DecodeSetup setup;
  setup.shape = shape;
  setup.order = plan.order;
  if (setup.order.placement == Placement::kContiguous) {
    const std::int64_t chunk = setup.order.chunk_tokens, piece = chunk * setup.order.branches;
    setup.order.branch_tokens = base::divide_up(shape.tokens, piece) * chunk;
  }
  setup.strategies = plan.strategies;
  setup.device = plan.device;
  setup.link = plan.link;
  setup.canonical = plan.canonical;
  setup.threads = plan.threads > 0 ? plan.threads : cores;
  setup.repeat = plan.repeat;
  setup.seed = plan.seed;
  setup.quick = plan.quick;
  return setup;
}

std::string shape_text(const Shape& shape) {
  std::string out = fmt::format("{}/{} heads of {}, {}, {}", shape.heads, shape.kv_heads, shape.head_dim,
                                dtype_name(shape.dtype), format_count(shape.tokens, "token"));
  if (shape.batch > 1) out += fmt::format(", {} sequences", shape.batch);
  if (shape.queries > 1) out += fmt::format(", {} queries", shape.queries);
  return out;
}

// What is printed for one shape. Only rank 0 has one.
class Report {
 public:
  Report(const BenchDecodeOptions& options, const DecodeSetup& setup, DecodeResult result)
      : options_(options), setup_(setup), result_(std::move(result)) {}

  // The same call on one rank with all cores: what many ranks are held against.
  void add_one_rank(const DecodeResult& one) {
    if (one.lines.empty()) return;
    one_rank_ = one.lines.front();
    result_.failures.insert(result_.failures.end(), one.failures.begin(), one.failures.end());
    for (const DecodeLine& line : result_.lines) {
      if (!setup_.promises_bits(line.chosen) || line.out_hash == one_rank_->out_hash) continue;
      result_.failures.push_back(fmt::format("{}: other bits ({:016x}) than one rank alone ({:016x})",
                                             strategy_name(line.strategy), line.out_hash, one_rank_->out_hash));
    }
  }

  void print() const {
    for (const std::string& note : result_.skipped) print_note("skipped {}\n", note);
    if (options_.json) {
      for (const DecodeLine& line : result_.lines) print_json(line, strategy_name(line.strategy));
      if (one_rank_) print_json(*one_rank_, "one_rank");
    } else if (!result_.lines.empty()) {
      print_table();
      print_ratios();
    }
    if (options_.why && !result_.why.empty()) {
      const std::string why = "\nWhy auto took what it took:\n" + result_.why;
      options_.json ? print_note("{}", why) : fmt::print("{}", why);
    }
    std::fflush(stdout);
    for (const std::string& failure : result_.failures) print_note("treeattn: check failed: {}\n", failure);
  }

  bool failed() const { return !result_.failures.empty(); }
  bool empty() const { return result_.lines.empty(); }

 private:
  bool is_one_rank(const DecodeLine& line) const { return one_rank_ && &line == &*one_rank_; }
  int ranks_of(const DecodeLine& line) const { return is_one_rank(line) ? 1 : result_.ranks; }

  void print_json(const DecodeLine& line, std::string_view name) const {
    const Shape& shape = setup_.shape;
    const int ranks = ranks_of(line);
    nlohmann::ordered_json out;
    out["transport"] = is_one_rank(line) ? "self" : result_.transport;
    out["ranks"] = ranks;
    out["hosts"] = is_one_rank(line) ? 1 : result_.hosts;
    out["strategy"] = name;
    out["heads"] = shape.heads;
    out["kv_heads"] = shape.kv_heads;
    out["head_dim"] = shape.head_dim;
    out["dtype"] = dtype_name(shape.dtype);
    out["tokens"] = shape.tokens;
    out["ms"] = line.ms;
    out["reduce_ms"] = line.reduce_ms;
    out["steps"] = line.steps;
    out["bytes_sent"] = per_rank(line.bytes, ranks);
    out["formula_bytes_sent"] = per_rank(line.formula_bytes, ranks);
    out["peak_bytes"] = line.peak_bytes;
    out["formula_peak_bytes"] = line.formula_peak_bytes;
    out["out_hash"] = fmt::format("{:016x}", line.out_hash);
    out["max_error"] = line.max_error;
    out["batch"] = shape.batch;
    out["queries"] = shape.queries;
    if (line.strategy == Strategy::kAuto) out["chosen"] = strategy_name(line.chosen);
    out["paper_bytes_sent"] = line.paper_bytes;
    out["remote_bytes_sent"] = line.remote_bytes;
    out["canonical"] = setup_.canonical;
    out["device"] = result_.device;
    if (setup_.device.on_gpu()) out["link"] = parallel::link_name(is_one_rank(line) ? DeviceLink::kHost : setup_.link);
    fmt::print("{}\n", json_line(out));
  }

  std::vector<std::string> cells(const DecodeLine& line, std::string name) const {
    const double ranks = ranks_of(line);
    const auto bytes = [](double value) { return format_bytes(static_cast<std::size_t>(value)); };
    if (line.strategy == Strategy::kAuto) name += fmt::format(" ({})", strategy_name(line.chosen));
    return {std::move(name),
            format_number(line.ms),
            format_number(line.reduce_ms),
            fmt::format("{}", line.steps),
            bytes(static_cast<double>(line.bytes) / ranks),
            bytes(static_cast<double>(line.formula_bytes) / ranks),
            format_bytes(line.remote_bytes),
            format_bytes(line.peak_bytes),
            format_bytes(line.formula_peak_bytes),
            fmt::format("{:.1e}", line.max_error),
            fmt::format("{:016x}", line.out_hash)};
  }

  std::string device_text() const {
    const std::size_t gpus = std::min(setup_.device.gpus.size(), static_cast<std::size_t>(result_.ranks));
    return fmt::format("{}{}, states by {}", result_.device, gpus > 1 ? fmt::format(" and {} more", gpus - 1) : "",
                       parallel::link_name(setup_.link));
  }

  void print_table() const {
    fmt::print("{}\n{}, {} on {}, {} a rank, {}{}\n\n", shape_text(setup_.shape), result_.transport,
               format_count(result_.ranks, "rank"), format_count(result_.hosts, "host"),
               format_count(setup_.threads, "thread"),
               setup_.device.on_gpu() ? device_text() : std::string(active_isa()),
               setup_.canonical ? "" : ", each merging what it carries first");
    Table table({{"strategy", Align::kLeft},
                 {"ms"},
                 {"reduce ms"},
                 {"steps"},
                 {"sent"},
                 {"formula"},
                 {"to hosts"},
                 {"peak"},
                 {"formula"},
                 {"error"},
                 {"hash"}});
    for (const DecodeLine& line : result_.lines) table.add(cells(line, std::string(strategy_name(line.strategy))));
    if (one_rank_) table.add(cells(*one_rank_, "one_rank"));
    table.print();
    std::vector<std::string> volumes;  // of those that were measured
    const auto add_volume = [&](bool ring, const char* formula) {
      for (const DecodeLine& line : result_.lines) {
        if ((line.chosen == Strategy::kRing) != ring) continue;
        volumes.push_back(fmt::format("{} = {}", formula, format_bytes(static_cast<std::size_t>(line.paper_bytes))));
        return;
      }
    };
    add_volume(false, "tree 2(p-1)/p (bd + 2b n_h) floats");
    add_volume(true, "ring 2btd(p-1) elements");
    fmt::print("\nThe paper's volume for one rank: {}\n", fmt::join(volumes, ", "));
  }

  void print_ratios() const {
    const DecodeLine* merge = result_.find(Strategy::kMerge);
    const DecodeLine* ring = result_.find(Strategy::kRing);
    const DecodeLine* paper = result_.find(Strategy::kPaper);
    const DecodeLine* automatic = result_.find(Strategy::kAuto);
    if (merge && one_rank_) fmt::print("merge / one_rank          {:.3f}\n", merge->ms / one_rank_->ms);
    if (merge && ring) fmt::print("ring / merge              {:.2f}\n", ring->ms / merge->ms);
    if (merge && paper && result_.ranks > 1) {
      fmt::print("paper / merge, reduction  {:.2f}\n", paper->reduce_ms / merge->reduce_ms);
    }
    const DecodeLine* best = nullptr;
    for (const DecodeLine& line : result_.lines) {
      if (line.strategy != Strategy::kAuto && (best == nullptr || line.ms < best->ms)) best = &line;
    }
    if (automatic && best) {
      fmt::print("auto / best               {:.3f}  (best: {})\n", automatic->ms / best->ms,
                 strategy_name(best->strategy));
    }
  }

  const BenchDecodeOptions& options_;
  DecodeSetup setup_;
  DecodeResult result_;
  std::optional<DecodeLine> one_rank_;
};

// Keeps the sum over shapes.
class Outcome {
 public:
  void add(const Report& report) {
    failed_ = failed_ || report.failed();
    empty_ = empty_ && report.empty();
  }
  int exit_code() const { return failed_ ? kCheckFailed : empty_ ? kUnavailable : kOk; }

 private:
  bool failed_ = false;
  bool empty_ = true;
};

int run_processes(const BenchDecodeOptions& options, const Plan& plan) {
  const std::shared_ptr<Communicator> world = meet_ranks(*options.command, plan.ranks, plan.rank_count);
  const int cores = take_own_cores(*world);
  Outcome outcome;
  for (const Shape& shape : plan.shapes) {
    const DecodeSetup setup = setup_for(plan, shape, cores);
    const Report report(options, setup, run_decode(world, setup));
    if (world->rank() == 0) report.print();
    outcome.add(report);
  }
  return outcome.exit_code();
}

int run_threads(const BenchDecodeOptions& options, const Plan& plan) {
  const int ranks = plan.rank_count > 0 ? plan.rank_count : 4;
  Outcome outcome;
  for (const Shape& shape : plan.shapes) {
    const DecodeSetup setup = setup_for(plan, shape, cores_of_thread(ranks));
    DecodeResult result;
    run_ranks(
        ranks,
        [&](const std::shared_ptr<Communicator>& world) {
          DecodeResult mine = run_decode(world, setup);
          if (world->rank() == 0) result = std::move(mine);
        },
        plan.ranks);
    Report report(options, setup, std::move(result));
    if (!report.empty()) {
      // Only now, when the ranks have given their memory back.
      DecodeSetup alone = setup;
      alone.strategies = {Strategy::kMerge};
      alone.link = DeviceLink::kHost;  // there is nothing to exchange
      alone.threads = ThreadPool::available_cores();
      report.add_one_rank(run_decode(self_communicator(), alone));
    }
    report.print();
    outcome.add(report);
  }
  return outcome.exit_code();
}

int run(const BenchDecodeOptions& options) {
  const Plan plan = make_plan(options);
  return launched() ? run_processes(options, plan) : run_threads(options, plan);
}

constexpr char kFooter[] =
    R"(Ranks are the processes of a launcher (mpirun, srun, torchrun), or else --ranks threads. With --device cuda they go
round the GPUs of the machine; several may share one.

Columns:
  ms         one decoding step: the slowest rank's time, median of the calls
  reduce ms  of it, the exchange between ranks; ring: all but the time spent attending
  steps      rounds of communication, one after the other
  sent       bytes a rank sends, on average; formula: the same by the cost model
  to hosts   bytes between hosts, all ranks together
  peak       bytes the largest rank holds: K, V, q, out and what the call allocates; formula: the paper's
  error      largest difference from double precision
  hash       of the bits of the result; one_rank is the same call on one rank with all cores

Examples:
  treeattn bench decode --quick
  treeattn bench decode --ranks 8 --strategy merge,ring --tokens 32k,128k
  treeattn bench decode --ranks 4 --heads 32 --kv-heads 8 --dtype int8 --why
  mpirun -n 4 treeattn bench decode --tokens 64k --json
  mpirun --host a:2,b:2 treeattn bench decode --deadline 10
  treeattn bench decode --device cuda --ranks 8 --link peer --tokens 640k --strategy merge,two_phase)";

}  // namespace

Command add_bench_decode(CommandLine& parent) {
  CommandLine* app =
      parent.add_subcommand("decode", "A decoding step over many ranks: tree strategies against the ring");
  auto options = std::make_shared<BenchDecodeOptions>();
  options->command = app;
  options->shape.add_to(*app, "131072");
  const auto text = [&](const char* name, std::string& value, const char* what, const char* type) {
    return app->add_option(name, value, what)->type_name(type);
  };
  add_device_option(*app, options->device);
  text("--link", options->link,
       "How states travel between GPUs: host, peer (each writes into all others) or nccl (default host)", "NAME");
  text("--ranks", options->ranks, "Threads that are ranks (default 4)", "N");
  text("--strategy", options->strategy,
       "paper two_phase merge butterfly gather two_level ring auto, or a list (default: all)", "LIST");
  text("--threads", options->threads, "Threads of each rank (default: the cores shared out over the ranks)", "N")
      ->own_to_rank();
  text("--repeat", options->repeat, "Calls per line; the median counts (default: one second, at least 5; ring 2 to 5)",
       "N");
  text("--seed", options->seed, "Of the random numbers (default 1)", "N");
  text("--deadline", options->deadline, "A rank that does not answer for so long is lost (default 30)", "SECONDS");
  text("--placement", options->placement, "Of the chunks: cyclic or contiguous (default cyclic)", "NAME");
  text("--branches", options->branches, "Leaves of the reduction tree, a power of two (default 256)", "N");
  text("--chunk", options->chunk, "Tokens of a chunk, a multiple of 64 (default 256)", "N");
  app->add_flag("--free-order", options->free_order, "Without the canonical order: one state a rank, other bits");
  app->add_flag("--quick", options->quick, "A fifth of the time, and 16384 tokens unless asked for");
  app->add_flag("--json", options->json, "One JSON object a line; docs/cli.md explains the keys");
  app->add_flag("--why", options->why, "Why auto took what it took: links, steps, bytes and times");
  app->footer(kFooter);
  return {app, [options] { return run(*options); }};
}

}  // namespace treeattn::tools
