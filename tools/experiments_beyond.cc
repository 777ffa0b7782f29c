// SPDX-License-Identifier: Apache-2.0
// Beyond the paper: levels of the cluster, shapes of the call, and clusters that are not even.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "experiments.h"
#include "svg_chart.h"
#include "table.h"
#include "treeattn/error.h"

namespace treeattn::tools {
namespace {

const Axis kTime{"time, us", true};

// The fastest of the trees of the usual lines.
double best_tree(const Sweep& sweep, std::size_t i) {
  return std::min(
      {sweep.at(Strategy::kPaper, i).us, sweep.at(Strategy::kButterfly, i).us, sweep.at(Strategy::kMerge, i).us});
}

std::string listed(const std::vector<double>& values) {
  std::vector<std::string> texts;
  for (const double value : values) texts.push_back(short_number(value));
  return texts.empty() ? "none" : fmt::format("{}", fmt::join(texts, ", "));
}

// " (by up to 1.50 times)"; nothing where it is by none.
std::string by_up_to(double times) { return times > 1 ? fmt::format(" (by up to {:.2f} times)", times) : ""; }

// Where ring is faster than every tree of the sweep.
std::vector<double> ring_wins(const Sweep& sweep) {
  std::vector<double> out;
  for (std::size_t i = 0; i < sweep.x().size(); ++i) {
    if (sweep.at(Strategy::kRing, i).us < best_tree(sweep, i)) out.push_back(sweep.x()[i]);
  }
  return out;
}

// Where it is faster than the paper's tree, whose three collectives cost latency.
std::vector<double> ring_beats_three(const Sweep& sweep) {
  std::vector<double> out;
  for (std::size_t i = 0; i < sweep.x().size(); ++i) {
    if (sweep.at(Strategy::kRing, i).us < sweep.at(Strategy::kPaper, i).us) out.push_back(sweep.x()[i]);
  }
  return out;
}

void add_sweep(Outcome& out, const Sweep& sweep, const std::string& id, const std::string& title, const Axis& x) {
  out.figures.push_back(sweep.figure(id, title, x, kTime, &DecodeTime::us, 1));
  out.tables.push_back(sweep.table(title, x.label));
}

// One adapter to a node, and states so large that bandwidth counts. The butterfly sends what every GPU has between the
// nodes, two levels what one of them has.
void run_two_level_batch(ExperimentContext& context, Outcome& out, const std::string& cluster, const char* device,
                         int on_node, const std::string& id) {
  const std::vector<SweepLine> lines = {{"flat (butterfly)", "butterfly", Strategy::kButterfly},
                                        {"flat (merge)", "fused", Strategy::kMerge},
                                        {"two levels", "two_level", Strategy::kTwoLevel}};
  const Sweep sweep(context, powers_of_two(1, context.quick ? 4 : 256), lines, [&](double batch) {
    DecodePoint at = decode_point(8 * on_node, 4096);
    at.cluster = cluster;
    at.cluster_lines = "adapters_per_node = 1\n";
    at.ranks_per_node = on_node;
    at.heads = 32;
    at.kv_heads = 8;
    at.batch = static_cast<std::int64_t>(batch);
    return at;
  });
  const std::string title = fmt::format("The reduction, 8 nodes of {} {} with one adapter", on_node, device);
  out.figures.push_back(
      sweep.figure(id, title, {"sequences", true}, {"reduction, us", true}, &DecodeTime::reduce_us, 1));
  out.tables.push_back(sweep.table(title, "sequences", &DecodeTime::reduce_us));
  std::vector<double> over_butterfly, over_all;
  double best = 0;
  for (std::size_t i = 0; i < sweep.x().size(); ++i) {
    const double butterfly = sweep.at(0, i).reduce_us, merge = sweep.at(1, i).reduce_us, two = sweep.at(2, i).reduce_us;
    if (two < butterfly) over_butterfly.push_back(sweep.x()[i]);
    if (two < std::min(butterfly, merge)) over_all.push_back(sweep.x()[i]);
    best = std::max(best, butterfly / two);
  }
  out.notes.push_back(fmt::format(
      "Nodes of {} with one adapter: batches where two levels beat the butterfly: {}{}; where they beat the "
      "flat tree (merge) too: {}.",
      on_node, listed(over_butterfly), by_up_to(best), listed(over_all)));
}

void run_two_level(ExperimentContext& context, Outcome& out) {
  const std::vector<SweepLine> lines = {{"three collectives", "tree", Strategy::kPaper},
                                        {"flat (merge)", "fused", Strategy::kMerge},
                                        {"flat (butterfly)", "butterfly", Strategy::kButterfly},
                                        {"two levels", "two_level", Strategy::kTwoLevel}};
  for (const int on_node : {8, 6, 5, 3}) {
    std::vector<double> ranks;
    for (int nodes = 2; nodes <= (context.quick ? 4 : 64); nodes *= 2) ranks.push_back(nodes * on_node);
    const Sweep sweep(context, ranks, lines, [&](double p) {
      DecodePoint at = decode_point(p, 40000 * p);
      at.ranks_per_node = on_node;
      return at;
    });
    const std::string title = fmt::format("The reduction, nodes of {} GPUs", on_node);
    out.figures.push_back(sweep.figure(fmt::format("two-level-{}", on_node), title, {"GPUs", true},
                                       {"reduction, us", false}, &DecodeTime::reduce_us, 1));
    out.tables.push_back(sweep.table(title, "GPUs", &DecodeTime::reduce_us));
    std::vector<double> over_merge, over_all;
    double best = 0;
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      const double two = sweep.at(Strategy::kTwoLevel, i).reduce_us, merge = sweep.at(Strategy::kMerge, i).reduce_us;
      if (two < merge) over_merge.push_back(ranks[i]);
      if (two < std::min(merge, sweep.at(Strategy::kButterfly, i).reduce_us)) over_all.push_back(ranks[i]);
      best = std::max(best, merge / two);
    }
    out.notes.push_back(fmt::format(
        "Nodes of {}: numbers of GPUs where two levels beat the flat tree (merge): {}{}; where they beat the "
        "butterfly too: {}.",
        on_node, listed(over_merge), by_up_to(best), listed(over_all)));
  }
  run_two_level_batch(context, out, "rtx4090", "RTX 4090", 2, "two-level-batch");
  run_two_level_batch(context, out, "dgx-h100", "H100", 8, "two-level-batch-8");
  run_two_level_batch(context, out, "dgx-h100", "H100", 6, "two-level-batch-6");
}

void run_gqa(ExperimentContext& context, Outcome& out) {
  const Sweep sweep(context, {1, 2, 4, 8, 16, 32}, usual_lines(), [](double kv_heads) {
    DecodePoint at = decode_point(64, 1048576);
    at.heads = 32;
    at.kv_heads = static_cast<std::int64_t>(kv_heads);
    return at;
  });
  add_sweep(out, sweep, "gqa", "32 query heads, 1M tokens, 64 GPUs", {"KV heads", true});
  out.notes.push_back(
      fmt::format("Fewer KV heads make what ring sends smaller, and leave the states as they are. Ring / best tree "
                  "falls from {:.0f} at 32 KV heads to {:.0f} at 1. Where ring wins: {}.",
                  sweep.at(Strategy::kRing, 5).us / best_tree(sweep, 5),
                  sweep.at(Strategy::kRing, 0).us / best_tree(sweep, 0), listed(ring_wins(sweep))));
}

void run_batch(ExperimentContext& context, Outcome& out) {
  const Sweep sweep(context, powers_of_two(1, context.quick ? 16 : 256), usual_lines(), [](double batch) {
    DecodePoint at = decode_point(64, 131072);
    at.heads = 32;
    at.kv_heads = 8;
    at.batch = static_cast<std::int64_t>(batch);
    return at;
  });
  add_sweep(out, sweep, "batch", "32/8 heads, 128k tokens a sequence, 64 GPUs", {"sequences", true});
  out.notes.push_back(fmt::format("Both grow with the batch. Where ring wins: {}.", listed(ring_wins(sweep))));
}

void run_queries(ExperimentContext& context, Outcome& out) {
  const Sweep sweep(context, powers_of_two(1, context.quick ? 16 : 4096), usual_lines(), [](double queries) {
    DecodePoint at = decode_point(8, 32768);
    at.heads = 32;
    at.kv_heads = 8;
    at.queries = static_cast<std::int64_t>(queries);
    return at;
  });
  add_sweep(out, sweep, "queries", "32/8 heads, 32k tokens, 8 GPUs", {"query tokens", true});
  const std::size_t last = sweep.x().size() - 1;
  out.notes.push_back(fmt::format(
      "States grow with the query tokens, K and V do not: ring / best tree goes from {:.1f} at one to {:.1f} at "
      "{:.0f}. "
      "Where ring wins: {}. Every rank of this ring attends with all queries; a prefill, where each has its own, is "
      "another matter and goes round the ring in this library too.",
      sweep.at(Strategy::kRing, 0).us / best_tree(sweep, 0),
      sweep.at(Strategy::kRing, last).us / best_tree(sweep, last), sweep.x()[last], listed(ring_wins(sweep))));
}

void run_short(ExperimentContext& context, Outcome& out) {
  for (const int ranks : {2, 8}) {
    const Sweep sweep(context, powers_of_two(ranks, context.quick ? 64 : 16384), usual_lines(),
                      [&](double tokens) { return decode_point(ranks, tokens); });
    add_sweep(out, sweep, fmt::format("short-{}", ranks), fmt::format("Short sequences, {} GPUs", ranks),
              {"tokens", true});
    out.notes.push_back(
        fmt::format("{} GPUs, lengths at which ring wins: {}; at which it beats the paper's three collectives: {}.",
                    ranks, listed(ring_wins(sweep)), listed(ring_beats_three(sweep))));
  }
}

void run_odd(ExperimentContext& context, Outcome& out) {
  const std::vector<double> ranks =
      context.quick ? std::vector<double>{3, 4, 5}
                    : std::vector<double>{2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 100, 127, 128};
  const std::vector<SweepLine> lines = {{"three collectives", "tree", Strategy::kPaper},
                                        {"gather", "gather", Strategy::kGather},
                                        {"butterfly", "butterfly", Strategy::kButterfly},
                                        {"merge", "fused", Strategy::kMerge}};
  const Sweep sweep(context, ranks, lines, [](double p) { return decode_point(p, 40000 * p); });
  out.figures.push_back(sweep.figure("odd-ranks", "The reduction, any number of GPUs, same bits", {"GPUs", true},
                                     {"reduction, us", false}, &DecodeTime::reduce_us, 1));
  out.tables.push_back(sweep.table("The reduction", "GPUs", &DecodeTime::reduce_us));
  out.notes.push_back(
      "Where p is no power of two a share is several nodes of the canonical tree, so that the bits stay the same: more "
      "states in a message, the same steps.");
}

// A cluster with one slow part: how much longer each strategy takes.
void add_uneven(ExperimentContext& context, Outcome& out, const std::string& what, const std::string& id,
                const std::function<std::string(double)>& lines_for) {
  const std::vector<SweepLine> lines = {{"ring", "ring", Strategy::kRing},
                                        {"two levels", "two_level", Strategy::kTwoLevel},
                                        {"merge", "fused", Strategy::kMerge}};
  const Sweep sweep(context, context.quick ? std::vector<double>{1, 4} : std::vector<double>{1, 2, 4, 8, 16}, lines,
                    [&](double factor) {
                      DecodePoint at = decode_point(context.quick ? 16 : 64, context.quick ? 640000 : 2560000);
                      if (factor > 1) at.cluster_lines = lines_for(factor);
                      return at;
                    });
  add_sweep(out, sweep, id, what, {"times slower", true});
  const std::size_t last = sweep.x().size() - 1;
  const auto growth = [&](Strategy s) { return sweep.at(s, last).us / sweep.at(s, 0).us; };
  out.notes.push_back(fmt::format(
      "{}, {:.0f} times slower: ring takes {:.2f} times as long, merge {:.2f}, two levels "
      "{:.2f}.",
      what, sweep.x()[last], growth(Strategy::kRing), growth(Strategy::kMerge), growth(Strategy::kTwoLevel)));
}

void run_uneven(ExperimentContext& context, Outcome& out) {
  if (!context.times.can_simulate()) {
    throw Unavailable("the closed form knows no slow links and devices; this experiment needs `treeattn simulate`");
  }
  add_uneven(context, out, "One slow GPU", "slow-device",
             [](double f) { return fmt::format("slow_device = 5 {}\n", f); });
  add_uneven(context, out, "One GPU with a slow link in its node", "slow-local",
             [](double f) { return fmt::format("slow_local = 5 {}\n", f); });
  add_uneven(context, out, "One node with slow adapters", "slow-remote",
             [](double f) { return fmt::format("slow_remote = 1 {}\n", f); });
}

}  // namespace

std::vector<Experiment> beyond_experiments() {
  return {
      {"two-level", "Flat against two levels", "Beyond the paper: where does reducing inside each node first pay?",
       run_two_level},
      {"gqa", "Fewer KV heads", "Beyond the paper: grouped-query attention shrinks K and V, not the states.", run_gqa},
      {"batch", "Several sequences", "Beyond the paper: a batch of sequences in one step.", run_batch},
      {"queries", "Several query tokens", "Beyond the paper: many queries make the states large. Where does ring win?",
       run_queries},
      {"short", "Short sequences", "Beyond the paper: does ring ever win with one query?", run_short},
      {"odd-ranks", "Rank counts that are no power of two", "Beyond the paper: any number of GPUs, with the same bits.",
       run_odd},
      {"uneven", "Unequal links and one slow rank", "Beyond the paper: one part of the cluster is slower.", run_uneven},
  };
}

}  // namespace treeattn::tools
