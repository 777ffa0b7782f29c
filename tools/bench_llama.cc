// SPDX-License-Identifier: Apache-2.0
// treeattn bench llama: a prompt and ten tokens, as in the paper's tables, by Tree Attention and by Ring Attention.
#include <fmt/format.h>

#include <algorithm>
#include <bitset>
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "allocation_counter.h"
#include "base/check.h"
#include "base/machine.h"
#include "bench_llama_steps.h"
#include "command.h"
#include "device_option.h"
#include "json_line.h"
#include "launched_ranks.h"
#include "model/memory_need.h"
#include "model/session.h"
#include "model_options.h"
#include "model_run.h"
#include "notes.h"
#include "options.h"
#include "parallel/agree.h"
#include "parallel/tree_attention.h"
#include "progress.h"
#include "table.h"

namespace treeattn::tools {
namespace {

struct BenchLlamaOptions {
  ModelOptions model;
  std::string tokens, new_tokens, runs, batch;
  bool steps = false;
  bool quick = false;
  bool json = false;
};

struct Setup {
  ModelPlan plan;
  std::vector<std::int64_t> tokens;
  std::vector<Strategy> strategies;
  std::int64_t new_tokens = 10;
  int runs = 10;

  std::int64_t shortest() const { return *std::min_element(tokens.begin(), tokens.end()); }
};

// The figures of the runs, in seconds; the slowest rank's.
struct Samples {
  std::vector<double> total, first, each;
};

struct Line {
  Strategy strategy = Strategy::kAuto;
  std::int64_t tokens = 0;
  Samples samples;
  double read_gb_s = 0;   // what a token reads, over its time
  double limit_gb_s = 0;  // what the machine reads at best, measured beside it
  std::size_t token_bytes = 0;
  std::size_t peak_bytes = 0, formula_bytes = 0;  // of a rank, weights apart
  std::uint64_t bytes_sent = 0;                   // by a rank, for the whole text
  std::uint64_t digest = 0;                       // of the tokens
};

double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

// NaN of a single value, which says nothing of it.
double standard_error(const std::vector<double>& values) {
  const double middle = mean(values);
  double sum = 0;
  for (const double x : values) sum += (x - middle) * (x - middle);
  const auto n = static_cast<double>(values.size());
  return std::sqrt(sum / (n - 1) / n);
}

constexpr std::int64_t kLongestOfRandom = std::int64_t{1} << 30;

// --tokens; where it was not given, those of the usual lengths that the model has room for.
std::vector<std::int64_t> parse_lengths(const std::string& given, const char* usual, std::int64_t least,
                                        std::int64_t most, std::int64_t room) {
  std::vector<std::int64_t> out;
  for (const std::string& text : split_list(given.empty() ? usual : given)) {
    const std::int64_t length = parse_count("--tokens", text, least, given.empty() ? kLongestOfRandom : most);
    if (!given.empty() || length <= room) out.push_back(length);
  }
  if (out.empty()) out.push_back(std::max(least, room));
  return out;
}

Setup make_setup(const BenchLlamaOptions& options, ModelPlan plan) {
  Setup setup;
  setup.plan = std::move(plan);
  std::int64_t& context = setup.plan.model.config.context;
  // Random numbers were trained for no length: the paper's tables go up to 256k with a shape of 128k.
  if (setup.plan.model.directory.empty()) context = kLongestOfRandom;
  setup.strategies = parse_strategies(options.model.strategy.empty() ? "auto,ring" : options.model.strategy);
  setup.new_tokens = options.new_tokens.empty() ? 10 : parse_count("--new-tokens", options.new_tokens, 2, 1 << 20);
  setup.tokens = parse_lengths(options.tokens, options.quick ? "256,512" : "512,1k,2k,4k", 1, context - 1,
                               context - setup.new_tokens);
  setup.runs =
      options.runs.empty() ? (options.quick ? 2 : 10) : static_cast<int>(parse_count("--runs", options.runs, 1, 1000));
  const std::int64_t longest = *std::max_element(setup.tokens.begin(), setup.tokens.end());
  base::require(longest + setup.new_tokens <= context, "--tokens is {} and --new-tokens {}; accepted: {} together",
                longest, setup.new_tokens, context);
  return setup;
}

// All lines on one rank.
class RankBench {
 public:
  RankBench(const Setup& setup, const ModelRank& rank) : setup_(setup), rank_(rank), world_(*rank.world) {}

  std::vector<Line> run() {
    std::vector<Line> lines;
    const std::vector<std::int64_t> lengths = lengths_with_room();
    const std::size_t steps = lengths.size() * setup_.strategies.size() * static_cast<std::size_t>(setup_.runs + 1);
    if (rank_.speaks) progress_ = std::make_unique<Progress>("running", steps);
    for (const std::int64_t tokens : lengths) {
      const std::size_t begin = lines.size();
      for (const Strategy strategy : setup_.strategies) {
        Line& line = lines.emplace_back();
        line.strategy = strategy;
        line.tokens = tokens;
      }
      double limit = read_limit();
      // The first round warms up; the strategies take turns, so that what else the machine does hits them alike.
      for (int run = -1; run < setup_.runs; ++run) {
        for (std::size_t i = begin; i < lines.size(); ++i) measure(lines[i], run);
      }
      limit = std::max(limit, read_limit());
      for (std::size_t i = begin; i < lines.size(); ++i) finish(lines[i], limit);
    }
    return lines;
  }

 private:
  // The shortest, which was looked at before the weights were read, and those that fit beside them on every machine.
  std::vector<std::int64_t> lengths_with_room() {
    std::vector<std::int64_t> out;
    for (const std::int64_t tokens : setup_.tokens) {
      const std::string lack = parallel::failure_of_any(world_, tokens == setup_.shortest() ? "" : lack_of(tokens));
      if (lack.empty()) {
        out.push_back(tokens);
      } else if (rank_.speaks) {
        print_note("skipped {}: {}\n", format_count(tokens, "token"), lack);
      }
    }
    return out;
  }

  // What this machine, or this rank's GPU, is short of; empty: nothing.
  std::string lack_of(std::int64_t tokens) const {
    const int gpu = rank_.ops.gpu();
    const int sharing = gpu < 0 ? rank_.ranks_here : place_of_rank(world_, setup_.plan.device).sharing;
    const std::size_t needed = formula_bytes(tokens) * static_cast<std::size_t>(sharing);
    const std::optional<std::size_t> usable = usable_memory(gpu);
    if (!usable || needed <= *usable) return {};
    return fmt::format("needs {} beside the weights, {} can be used", format_bytes(needed), format_bytes(*usable));
  }

  // One prompt and its tokens. run < 0 is not counted.
  void measure(Line& line, int run) {
    if (progress_) progress_->step(fmt::format("{} tokens, {}", line.tokens, strategy_name(line.strategy)));
    LlamaOptions options = setup_.plan.llama;
    options.attention.strategy = line.strategy;
    std::vector<std::int32_t> prompt;
    for (std::int64_t i = 0; i < line.tokens; ++i) {
      prompt.push_back(static_cast<std::int32_t>((i * 7919 + 13) % setup_.plan.model.config.vocab));
    }
    GenerateOptions text;
    text.max_tokens = setup_.new_tokens;
    text.ignore_eos = true;
    const RankPeak peak(world_);
    model::Session session(rank_.make_llama(options), nullptr);
    const GenerateResult result = session.generate(prompt, text);
    const std::size_t heap = peak.bytes();
    const double first = parallel::largest_of_ranks(world_, result.stats.first_token_seconds);
    const double rest = parallel::largest_of_ranks(
        world_, std::accumulate(result.stats.token_seconds.begin(), result.stats.token_seconds.end(), 0.0));
    const KvCache& kept = session.llama().cache();
    const std::size_t cache = kept.allocated_bytes() + kept.store().workspace_bytes();
    line.peak_bytes =
        std::max(line.peak_bytes, parallel::largest_of_ranks(world_, heap) + parallel::largest_of_ranks(world_, cache));
    line.token_bytes = rank_.model.weights->bytes_per_token() * static_cast<std::size_t>(rank_.ranks_here) +
                       cached_here(session.llama());
    line.bytes_sent = parallel::largest_of_ranks(world_, result.stats.bytes_sent);
    for (const std::int32_t token : result.tokens) {
      line.digest = (line.digest ^ static_cast<std::uint64_t>(token)) * 0x100000001b3ull;
    }
    if (run < 0) {
      line.digest = 0;
      return;
    }
    line.samples.total.push_back(first + rest);
    line.samples.first.push_back(first);
    line.samples.each.push_back(rest / static_cast<double>(result.stats.token_seconds.size()));
  }

  // K and V of the whole text, all layers, as far as they are on this machine.
  std::uint64_t cached_here(const model::Llama& llama) const {
    const auto of_rank = parallel::kv_bytes_of_ranks(llama.cache().store(), llama.sequences());
    std::uint64_t bytes = 0;
    for (int rank = 0; rank < world_.size(); ++rank) {
      if (world_.node_of(rank) == world_.node_of(world_.rank())) bytes += of_rank[static_cast<std::size_t>(rank)];
    }
    return bytes * static_cast<std::uint64_t>(llama.config().layers);
  }

  // By all cores that the ranks of this machine have, or by the GPUs they are on, while the other ranks wait.
  double read_limit() {
    struct Reader {
      int gpu = 0;
      std::bitset<4096> processors;
    } mine{rank_.ops.gpu(), {}};
    for (const int processor : base::usable_processors()) mine.processors.set(static_cast<std::size_t>(processor));
    const std::vector<Reader> readers = parallel::gathered(world_, mine);
    std::set<int> gpus;
    for (int rank = 0; rank < world_.size(); ++rank) {
      if (world_.node_of(rank) != world_.node_of(0)) continue;
      const Reader& reader = readers[static_cast<std::size_t>(rank)];
      gpus.insert(reader.gpu);
      mine.processors |= reader.processors;
    }
    std::vector<int> processors;
    for (std::size_t i = 0; i < mine.processors.size(); ++i) {
      if (mine.processors[i]) processors.push_back(static_cast<int>(i));
    }
    double out = 0;
    if (rank_.speaks) out = read_gb_s(rank_.ops.gpu(), processors) * static_cast<double>(gpus.size());
    world_.broadcast(std::as_writable_bytes(std::span(&out, 1)), 0);
    return out;
  }

  void finish(Line& line, double limit) {
    line.limit_gb_s = limit;
    line.read_gb_s = static_cast<double>(line.token_bytes) / mean(line.samples.each) / 1e9;
    line.formula_bytes = formula_bytes(line.tokens);
  }

  std::size_t formula_bytes(std::int64_t tokens) const {
    return model::memory_need(setup_.plan.model.config, setup_.plan.llama, setup_.plan.weights,
                              tokens + setup_.new_tokens, world_.size())
        .of_rank();
  }

  const Setup& setup_;
  const ModelRank& rank_;
  Communicator& world_;
  std::unique_ptr<Progress> progress_;
};

void print_json(const Setup& setup, const ModelRank& rank, const Line& line) {
  nlohmann::ordered_json out;
  const auto figure = [&](const char* name, const std::vector<double>& seconds) {
    out[std::string(name) + "_ms"] = 1e3 * mean(seconds);
    out[std::string(name) + "_stderr_ms"] = 1e3 * standard_error(seconds);
  };
  out["strategy"] = strategy_name(line.strategy);
  out["tokens"] = line.tokens;
  out["new_tokens"] = setup.new_tokens;
  out["ranks"] = rank.world->size();
  out["transport"] = rank.world->transport();
  out["runs"] = line.samples.total.size();
  figure("total", line.samples.total);
  figure("first_token", line.samples.first);
  figure("token", line.samples.each);
  out["token_bytes"] = line.token_bytes;
  out["read_gb_s"] = line.read_gb_s;
  out["limit_gb_s"] = line.limit_gb_s;
  out["peak_bytes"] = line.peak_bytes;
  out["formula_bytes"] = line.formula_bytes;
  out["bytes_sent"] = line.bytes_sent;
  out["digest"] = fmt::format("{:016x}", line.digest);
  fmt::print("{}\n", json_line(out));
}

std::string error_text(const std::vector<double>& values, double unit) {
  return values.size() < 2 ? "-" : format_number(unit * standard_error(values));
}

void print_table(const Setup& setup, const ModelRank& rank, const std::vector<Line>& lines) {
  const model::LlamaConfig& c = setup.plan.model.config;
  fmt::print("{} layers of {}, {}/{} heads of {}; cache {}; {} ({}), {} each; {}, {}\n\n", c.layers, c.hidden, c.heads,
             c.kv_heads, c.head_dim, dtype_name(setup.plan.llama.kv_type), format_count(rank.world->size(), "rank"),
             rank.world->transport(), format_count(rank.pool.size(), "thread"),
             format_count(setup.new_tokens, "new token"), format_count(setup.runs, "run"));
  Table table({{"tokens"},
               {"strategy", Align::kLeft},
               {"total s"},
               {"+-"},
               {"first s"},
               {"+-"},
               {"token ms"},
               {"+-"},
               {"GB/s"},
               {"limit"},
               {"peak"},
               {"formula"},
               {"sent"}});
  for (const Line& line : lines) {
    const Samples& s = line.samples;
    table.add({fmt::format("{}", line.tokens), std::string(strategy_name(line.strategy)), format_number(mean(s.total)),
               error_text(s.total, 1), format_number(mean(s.first)), error_text(s.first, 1),
               format_number(1e3 * mean(s.each)), error_text(s.each, 1e3), format_number(line.read_gb_s),
               format_number(line.limit_gb_s), format_bytes(line.peak_bytes), format_bytes(line.formula_bytes),
               format_bytes(line.bytes_sent)});
  }
  table.print();
}

// The tokens are the same by every strategy that promises it.
int check(const std::vector<Line>& lines) {
  int code = kOk;
  for (const Line& a : lines) {
    for (const Line& b : lines) {
      const bool comparable = &a < &b && a.tokens == b.tokens && same_bits(a.strategy) && same_bits(b.strategy);
      if (!comparable || a.digest == b.digest) continue;
      print_note("treeattn: check failed: {} and {} made other texts of {} tokens\n", strategy_name(a.strategy),
                 strategy_name(b.strategy), a.tokens);
      code = kCheckFailed;
    }
  }
  return code;
}

StepsBench steps_bench(const BenchLlamaOptions& options, ModelPlan plan) {
  StepsBench bench{std::move(plan), {}, {}};
  const bool on_gpu = bench.plan.device.on_gpu();
  const std::int64_t context = bench.plan.model.config.context;
  bench.tokens = parse_lengths(options.tokens, on_gpu ? "0,32k,128k" : "0,4k,32k", 0, context, context);
  for (const std::string& text : split_list(!options.batch.empty() ? options.batch : on_gpu ? "1,16" : "1")) {
    bench.batches.push_back(parse_count("--batch", text, 1, 1024));
  }
  bench.new_tokens = options.new_tokens.empty() ? std::min<std::int64_t>(64, context / 2)
                                                : parse_count("--new-tokens", options.new_tokens, 4, context / 2);
  bench.prefill = options.quick ? 0 : std::min<std::int64_t>(8192, context);
  bench.json = options.json;
  return bench;
}

int run(const BenchLlamaOptions& options) {
  ModelPlan plan = make_model_plan(options.model);
  if (options.steps || (plan.device.on_gpu() && plan.rank_count <= 1 && !launched())) {
    base::require(plan.rank_count <= 1, "--steps with --ranks {}; accepted: 1", plan.rank_count);
    for (const auto& [name, value] : {std::pair{"--runs", &options.runs}, {"--strategy", &options.model.strategy}}) {
      base::require(value->empty(), "{} is {}; accepted: only without --steps, and not of one rank on a GPU", name,
                    *value);
    }
    return bench_llama_steps(steps_bench(options, std::move(plan)));
  }
  base::require(options.batch.empty(), "--batch is {}; accepted: only with --steps", options.batch);
  const Setup setup = make_setup(options, std::move(plan));
  return run_model(setup.plan, setup.shortest() + setup.new_tokens, [&](const ModelRank& rank) {
    const std::vector<Line> lines = RankBench(setup, rank).run();
    if (!rank.speaks) return kOk;
    if (options.json) {
      for (const Line& line : lines) print_json(setup, rank, line);
    } else {
      print_table(setup, rank, lines);
    }
    return check(lines);
  });
}

constexpr char kFooter[] = R"(Columns:
  total s   the prompt and all new tokens: mean of the runs and its standard error, after a run that is not counted
  first s   of it, until the first token
  token ms  each token after it
  GB/s      weights and cache that a token reads on this machine, every rank its own, over the time of a token;
            limit: what this machine, or its GPUs, reads at best, measured beside it
  peak      bytes the largest rank holds beside the weights; formula: what the command allows for before it begins
  sent      bytes a rank sends for the whole text

With --steps, and always with one rank on a GPU and no launcher: decode steps after texts of --tokens tokens (0,4k,32k;
on a GPU 0,32k,128k), whose keys are random numbers, for batches of --batch (1; on a GPU 1,16), against the time of
reading the weights and the cache once at the bandwidth measured in the run; the matrices of a layer by themselves; and,
on a GPU, a prompt of 8k against the rate of cuBLASLt.

Examples:
  treeattn bench llama --random-weights llama-3.2-1b --quick
  treeattn bench llama --model Llama-3.2-1B --ranks 2 --tokens 1k,4k --strategy merge,ring --runs 5
  mpirun -n 4 treeattn bench llama --random-weights llama-3.1-8b --weights int8 --tokens 32k --json
  mpirun -n 2 treeattn bench llama --random-weights llama-3.2-1b --tokens 8k,16k,32k,64k,128k,256k  (the paper)
  treeattn bench llama --random-weights llama-3.2-1b --steps --tokens 0,4k,32k
  treeattn bench llama --random-weights llama-3.1-8b --device cuda)";

}  // namespace

Command add_bench_llama(CommandLine& parent) {
  CommandLine* app =
      parent.add_subcommand("llama", "A prompt and ten tokens: tree against ring, as in the paper's tables");
  auto options = std::make_shared<BenchLlamaOptions>();
  options->model.many_strategies = true;
  options->model.add_to(*app);
  app->add_option("--tokens", options->tokens, "Lengths of the prompt, as far as memory allows (default 512,1k,2k,4k)")
      ->type_name("LIST");
  app->add_option("--new-tokens", options->new_tokens, "Tokens after it (default 10; with --steps 64)")->type_name("N");
  app->add_option("--batch", options->batch, "With --steps: sequences decoded together (default 1; on a GPU 1,16)")
      ->type_name("LIST");
  app->add_option("--runs", options->runs, "Runs that count (default 10, as in the paper)")->type_name("N");
  app->add_flag("--steps", options->steps, "Decode steps alone, after texts that are not computed; one rank");
  app->add_flag("--quick", options->quick, "256 and 512 tokens and two runs, unless asked for others");
  app->add_flag("--json", options->json, "One JSON object a line; docs/cli.md explains the keys");
  app->footer(kFooter);
  return {app, [options] { return run(*options); }};
}

}  // namespace treeattn::tools
