// SPDX-License-Identifier: Apache-2.0
// treeattn demo: a pass key is hidden in a long text, the text is spread over ranks, the model is asked for the key,
// and Tree Attention is held against Ring Attention on the cache that is there now.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "allocation_counter.h"
#include "base/check.h"
#include "base/timing.h"
#include "command.h"
#include "haystack.h"
#include "json_line.h"
#include "launched_ranks.h"
#include "model/session.h"
#include "model_options.h"
#include "model_run.h"
#include "option_errors.h"
#include "options.h"
#include "parallel/agree.h"
#include "plan/tree_order.h"
#include "rate_progress.h"
#include "table.h"
#include "treeattn/error.h"

namespace treeattn::tools {
namespace {

struct DemoCommand {
  ModelOptions model;
  std::string stories, tokens = "16k", depth = "37", seed = "7", steps = "8";
  bool json = false;
};

// Beside the installed command, or where this one was built.
std::filesystem::path demo_directory() {
  std::error_code none;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", none);
  const std::filesystem::path installed = self.parent_path() / TREEATTN_INSTALLED_DEMO_DIR;
  return std::filesystem::exists(installed / "stories.txt", none) ? installed : TREEATTN_DEMO_DIR;
}

// What one way of attending costs a decoded token.
struct Way {
  Strategy strategy = Strategy::kMerge;
  double step_ms = 0;
  std::uint64_t bytes = 0;     // sent by the rank that sends most, all layers
  std::size_t peak_bytes = 0;  // allocated for the step, of one rank
  std::int32_t token = 0;      // what the model said, so that both can be seen to agree
};

// Decodes `steps` tokens by a strategy and forgets them again.
Way measure(model::Llama& llama, Strategy strategy, int steps, std::int32_t first) {
  Communicator& world = *llama.communicator();
  const SequenceId sequence = llama.sequences().front();
  const std::int64_t length = llama.cache().length(sequence);
  ParallelOptions options = llama.options().attention;
  options.strategy = strategy;
  llama.change_attention(options);
  std::vector<float> logits(static_cast<std::size_t>(llama.config().vocab));
  Way way{.strategy = strategy};
  way.token = first;
  const auto decode = [&] {
    const auto start = base::Clock::now();
    llama.decode({&sequence, 1}, {&way.token, 1}, logits);
    const double ms = 1e3 * base::seconds_since(start);
    way.token = static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
    return ms;
  };
  decode();  // warms up
  const RankPeak peak(world);
  for (int step = 0; step < steps; ++step) {
    world.barrier();
    const std::uint64_t sent = world.traffic().bytes;
    way.step_ms += decode() / steps;
    way.bytes = world.traffic().bytes - sent;
  }
  const std::size_t kept = strategy == Strategy::kRing ? llama.cache().store().workspace_bytes() : 0;
  way.peak_bytes = parallel::largest_of_ranks(world, peak.bytes() + kept);
  way.bytes = parallel::largest_of_ranks(world, way.bytes);
  llama.truncate(sequence, length);
  return way;
}

// Which ranks hold the tokens [first, end).
std::set<int> holders(const KvCache& cache, std::int64_t first, std::int64_t end) {
  const ReductionOrder& order = cache.config().order;
  std::set<int> out;
  for (std::int64_t chunk = plan::chunk_of(order, first); chunk <= plan::chunk_of(order, end - 1); ++chunk) {
    out.insert(cache.rank_of_leaf()[static_cast<std::size_t>(plan::leaf_of_chunk(order, chunk))]);
  }
  return out;
}

void print_ways(const std::vector<Way>& ways, int layers) {
  fmt::print("\nOne more token, by Tree Attention and by Ring Attention, on the same cache:\n\n");
  Table table({{"attention", Align::kLeft}, {"ms a token"}, {"bytes sent by a rank"}, {"memory beside the cache"}});
  for (const Way& way : ways) {
    table.add({way.strategy == Strategy::kRing ? "ring" : "tree", format_number(way.step_ms), format_bytes(way.bytes),
               format_bytes(way.peak_bytes)});
  }
  table.add({"ring / tree", fmt::format("{:.1f}", ways[1].step_ms / ways[0].step_ms),
             fmt::format("{:.0f}", static_cast<double>(ways[1].bytes) / static_cast<double>(ways[0].bytes)),
             fmt::format("{:.1f}", static_cast<double>(ways[1].peak_bytes) / static_cast<double>(ways[0].peak_bytes))});
  table.print();
  fmt::print("(all {} layers; both say the same token)\n", layers);
}

constexpr std::int64_t kAnswer = 8;  // tokens: a space, five digits, and what ends them

// What the options say, checked, and the text that they ask for.
struct Demo {
  ModelPlan plan;
  Haystack hay;
  int depth = 0;  // percent
  int steps = 0;  // that are timed
  bool json = false;

  std::int64_t length() const { return static_cast<std::int64_t>(hay.tokens.size()); }
};

Demo make_demo(DemoCommand options) {
  const std::filesystem::path home = demo_directory();
  if (options.model.model.empty()) options.model.model = (home / "model").string();
  if (options.model.ranks.empty() && !launched()) options.model.ranks = "4";
  Demo demo;
  demo.json = options.json;
  demo.plan = make_model_plan(options.model);
  const Strategy strategy = demo.plan.llama.attention.strategy;
  base::require(strategy != Strategy::kRing,
                "--strategy is ring; accepted by demo: another, which it holds against ring");
  if (strategy == Strategy::kAuto) demo.plan.llama.attention.strategy = Strategy::kMerge;
  require_tokenizer(options.model, demo.plan, "");
  const std::int64_t tokens = parse_count("--tokens", options.tokens, 1, std::int64_t{1} << 40);
  demo.depth = static_cast<int>(parse_count("--depth", options.depth, 0, 100));
  const auto seed = static_cast<std::uint64_t>(parse_count("--seed", options.seed, 0, std::int64_t{1} << 62));
  demo.steps = static_cast<int>(parse_count("--steps", options.steps, 1, 1000));
  const std::int64_t context = demo.plan.model.config.context, most = context - kAnswer - demo.steps - 1;
  base::require(tokens <= most, "--tokens is {}; accepted: at most {}, so that the answer fits into the context of {}",
                tokens, most, context);
  const model::Tokenizer& tokenizer = *demo.plan.model.tokenizer;
  std::vector<std::int32_t> begin;
  if (const auto bos = tokenizer.bos()) begin.push_back(*bos);
  const std::filesystem::path stories =
      options.stories.empty() ? home / "stories.txt" : std::filesystem::path(options.stories);
  const std::vector<std::string> paragraphs = inside_option("--stories", [&] { return read_paragraphs(stories); });
  for (const std::string& paragraph : paragraphs) require_utf8("a paragraph of --stories", paragraph);
  demo.hay = with_option("--tokens", options.tokens, [&] {
    return make_haystack(
        paragraphs, [&](std::string_view text) { return tokenizer.encode(text); }, begin, tokens, demo.depth, seed);
  });
  return demo;
}

// What came of it on a rank.
struct Finding {
  std::string answer;
  bool found = false;
  double first_token_s = 0;
  std::set<int> held_by;  // ranks that have the key in their part of the cache
  std::vector<Way> ways;  // tree, ring
};

// Reads the text and answers, aloud where it is this rank's to speak.
void ask(const Demo& demo, const ModelRank& rank, model::Session& session, Finding& finding) {
  const bool talks = rank.speaks && !demo.json;
  if (talks) {
    fmt::print("A text of {} tokens. Hidden in it, after {} % of its paragraphs: The pass key is {}.\n", demo.length(),
               demo.depth, demo.hay.key);
    std::fflush(stdout);
  }
  RateProgress progress("reading the text", "tokens");
  TextListener listener;
  if (rank.speaks) {
    listener.prefill = [&](std::int64_t done, std::int64_t total) { progress.update(done, total); };
  }
  listener.text = [&](std::string_view more) {
    if (talks && finding.answer.empty()) {
      progress.clear();
      fmt::print("\nWhat is the pass key? The pass key is");
    }
    finding.answer += more;
    if (!talks) return;
    fmt::print("{}", more);
    std::fflush(stdout);
  };
  GenerateOptions text;
  text.max_tokens = kAnswer;
  text.stop = {"."};
  finding.first_token_s = session.generate(demo.hay.tokens, text, listener).stats.first_token_seconds;
  progress.clear();  // with --json nothing has been said
  finding.found = finding.answer == fmt::format(" {}", demo.hay.key);
  finding.held_by = holders(session.llama().cache(), demo.hay.needle_first, demo.hay.needle_end);
  if (!talks) return;
  fmt::print(".\n{}; read in {} s on {}. The key is at tokens {} to {}, which rank {} holds.\n",
             finding.found ? "Right" : fmt::format("Wrong: it was {}", demo.hay.key),
             format_number(finding.first_token_s), format_count(rank.world->size(), "rank"), demo.hay.needle_first,
             demo.hay.needle_end - 1, fmt::join(finding.held_by, " and "));
}

std::vector<Way> measure_both(const Demo& demo, model::Llama& llama) {
  std::vector<Way> ways;
  for (const Strategy strategy : {demo.plan.llama.attention.strategy, Strategy::kRing}) {
    ways.push_back(measure(llama, strategy, demo.steps, demo.hay.tokens.back()));
  }
  if (ways[0].token != ways[1].token) {
    throw Error(fmt::format("tree and ring do not say the same token: {} and {}", ways[0].token, ways[1].token));
  }
  return ways;
}

void print_json(const Demo& demo, const Finding& finding, int ranks) {
  nlohmann::ordered_json out{{"tokens", demo.length()},
                             {"depth_percent", demo.depth},
                             {"key", demo.hay.key},
                             {"answer", finding.answer},
                             {"found", finding.found},
                             {"needle_first", demo.hay.needle_first},
                             {"needle_end", demo.hay.needle_end},
                             {"held_by", finding.held_by},
                             {"ranks", ranks},
                             {"first_token_s", finding.first_token_s}};
  for (const Way& way : finding.ways) {
    out[way.strategy == Strategy::kRing ? "ring" : "tree"] = {{"strategy", strategy_name(way.strategy)},
                                                              {"step_ms", way.step_ms},
                                                              {"bytes_sent", way.bytes},
                                                              {"peak_bytes", way.peak_bytes}};
  }
  fmt::print("{}\n", json_line(out));
}

int run(const DemoCommand& options) {
  const Demo demo = make_demo(options);
  return run_model(demo.plan, demo.length() + kAnswer + demo.steps + 1, [&](const ModelRank& rank) {
    model::Session session(rank.make_llama(demo.plan.llama), demo.plan.model.tokenizer.get());
    Finding finding;
    ask(demo, rank, session, finding);
    finding.ways = measure_both(demo, session.llama());
    const int ranks = rank.world->size();
    if (rank.speaks && demo.json) print_json(demo, finding, ranks);
    if (rank.speaks && !demo.json && ranks > 1) {
      print_ways(finding.ways, static_cast<int>(demo.plan.model.config.layers));
    }
    return finding.found ? kOk : kCheckFailed;
  });
}

constexpr char kFooter[] =
    R"(The model, 5.7 million parameters, comes with treeattn (tools/demo_model/README.md). The exit code is 1 when it does not
find the key. On one rank there is nothing to compare.

Examples:
  treeattn demo
  treeattn demo --tokens 64k --depth 80 --ranks 2
  mpirun -n 4 treeattn demo --seed 3 --json)";

}  // namespace

Command add_demo(CommandLine& parent) {
  CommandLine* app = parent.add_subcommand("demo", "Find a pass key in a long text that is spread over ranks");
  auto options = std::make_shared<DemoCommand>();
  app->add_option("--tokens", options->tokens, "Length of the text; 32k is 32768 (default 16k)")->type_name("N");
  app->add_option("--depth", options->depth, "Where the key is hidden (default 37)")->type_name("PERCENT");
  app->add_option("--seed", options->seed, "Another text, another key (default 7)")->type_name("N");
  app->add_option("--steps", options->steps, "Tokens that are timed (default 8)")->type_name("N");
  app->add_option("--stories", options->stories, "Paragraphs to make the text of, one a line")
      ->type_name("FILE")
      ->own_value_to_rank();
  options->model.must_have_tokenizer = true;
  options->model.add_to(*app);
  app->get_option("--model")->description("Another model: a directory as Hugging Face has them");
  app->get_option("--strategy")->description("The tree that is held against ring (default merge)");
  app->get_option("--ranks")->description("Threads that are ranks (default 4); under a launcher its processes");
  app->add_flag("--json", options->json, "One JSON object; docs/cli.md explains the keys");
  app->footer(kFooter);
  return {app, [options] { return run(*options); }};
}

}  // namespace treeattn::tools
