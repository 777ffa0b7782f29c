// SPDX-License-Identifier: Apache-2.0
// The paper's tables of whole Llama models: a prefill and ten tokens, with the model's real layer sizes. Attention and
// exchange of every layer are simulated; prefill and weights are counted in operations and bytes.
#include <fmt/format.h>

#include <algorithm>

#include "experiments.h"
#include "model_size.h"
#include "plan/fit.h"
#include "table.h"

namespace treeattn::tools {
namespace {

constexpr int kTokens = 10;  // decoded after the prefill

struct PaperRow {
  double length = 0;
  double tree_s = 0;
  double ring_s = 0;
};

struct LlamaTable {
  const char* id;
  const char* model;
  const char* cluster;
  int devices;
  std::vector<PaperRow> rows;
};

struct OurRow {
  double prefill_s = 0;
  double weights_s = 0;
  double tree_s = 0;  // all of it
  double ring_s = 0;
  Source source = Source::kClosedForm;
};

// Products with every weight, and attention of every token to those before it, shared by the devices.
double prefill_seconds(const plan::ModelSize& m, const plan::Cluster& cluster, int devices, double length) {
  const double products = 2.0 * static_cast<double>(m.read_weights) * length;
  const double attention = 4.0 * static_cast<double>(m.layers * m.heads * m.head_dim) * length * length / 2;
  return (products + attention) / (devices * cluster.device_flops_per_s);
}

OurRow simulate_row(ExperimentContext& context, const LlamaTable& table, double length) {
  const plan::ModelSize m = model_size(find_model(table.model), DType::kBFloat16, DType::kBFloat16);
  const plan::Cluster cluster = plan::find_cluster(table.cluster);
  DecodePoint point;
  point.cluster = table.cluster;
  point.ranks = table.devices;
  point.ranks_per_node = std::min(table.devices, cluster.devices_per_node);
  point.heads = m.heads;
  point.kv_heads = m.kv_heads;
  point.head_dim = m.head_dim;
  point.tokens = static_cast<std::int64_t>(length);
  const auto layer_seconds = [&](Strategy strategy) {
    point.strategy = strategy;
    const DecodeTime time = context.times.at(point);
    return std::pair(time.us / 1e6, time.source);
  };
  OurRow row;
  row.prefill_s = prefill_seconds(m, cluster, table.devices, length);
  row.weights_s = static_cast<double>(m.read_weight_bytes) / cluster.device_bytes_per_s;
  const auto [tree, source] = layer_seconds(Strategy::kPaper);
  const double ring = layer_seconds(Strategy::kRing).first;
  const double layers = static_cast<double>(m.layers);
  row.tree_s = row.prefill_s + kTokens * (row.weights_s + layers * tree);
  row.ring_s = row.prefill_s + kTokens * (row.weights_s + layers * ring);
  row.source = source;
  return row;
}

// Prefill, weights and Python are the same for both, so ring less tree is ring's messages less tree's collectives.
void add_comparisons(const LlamaTable& table, const std::string& where, const std::vector<OurRow>& ours, Outcome& out) {
  const auto config = find_model(table.model);
  const double layer_calls = static_cast<double>(kTokens * config.layers), hops = layer_calls * (table.devices - 1);
  std::vector<double> length, hop_s;
  double paper_gap = 0, our_gap = 0;
  for (std::size_t i = 0; i < ours.size(); ++i) {
    length.push_back(table.rows[i].length);
    hop_s.push_back((table.rows[i].ring_s - table.rows[i].tree_s) / hops);
    paper_gap += table.rows[i].ring_s - table.rows[i].tree_s;
    our_gap += ours[i].ring_s - ours[i].tree_s;
  }
  const plan::Line hop = plan::fit_line(length, hop_s);
  const double overhead = std::max(0.0, hop.offset);
  const double with = our_gap + overhead * hops * static_cast<double>(ours.size());
  const double token_bytes = 4.0 * static_cast<double>(config.kv_heads * config.head_dim);  // K and V, bfloat16
  const PaperRow& last = table.rows.back();
  out.comparisons.push_back(
      {fmt::format("ring less tree at {:.0f} tokens, {}", last.length, where), last.ring_s - last.tree_s,
       ours.back().ring_s - ours.back().tree_s, "s", ours.back().source,
       fmt::format(
           "Over all lengths our links give {:.0f} % of the authors' gap, and {:.0f} % with a modelled {:.2g} ms of "
           "host time on every message of the ring; the rest grows with the share, as if it were sent at {:.2g} "
           "GB/s.",
           100 * our_gap / paper_gap, 100 * with / paper_gap, 1e3 * overhead,
           token_bytes / table.devices / hop.slope / 1e9)});
  const PaperRow& first = table.rows.front();
  out.comparisons.push_back(
      {fmt::format("tree at {:.0f} tokens, {}", first.length, where), first.tree_s, ours.front().tree_s, "s",
       ours.front().source,
       fmt::format(
           "Ours run at peak rates without a host; {:.2g} ms of host time a layer and token, switched on, would "
           "explain all of the difference.",
           1e3 * (first.tree_s - ours.front().tree_s) / layer_calls)});
}

void run_table(ExperimentContext& context, const LlamaTable& table, Outcome& out) {
  const std::string where = fmt::format("{}, {} devices of {}", table.model, table.devices, table.cluster);
  DataTable rows{fmt::format("{}: prefill and {} tokens, seconds", where, kTokens),
                 {"tokens", "tree, paper", "tree, ours", "ring, paper", "ring, ours", "ring / tree, paper", "ours",
                  "gap, paper", "gap, ours", "source"},
                 {}};
  Figure figure{fmt::format("llama-{}", table.id), where, {"tokens", true}, {"seconds", true}, {}};
  Series paper_ring{"ring", "ring", Source::kPaper, {}, {}}, paper_tree{"tree", "tree", Source::kPaper, {}, {}};
  Series our_ring{"ring", "ring", Source::kSimulated, {}, {}}, our_tree{"tree", "tree", Source::kSimulated, {}, {}};
  std::vector<OurRow> rows_of_ours;
  for (const PaperRow& paper : table.rows) {
    const OurRow ours = simulate_row(context, table, paper.length);
    rows_of_ours.push_back(ours);
    our_ring.source = our_tree.source = ours.source;
    for (Series* series : {&paper_ring, &paper_tree, &our_ring, &our_tree}) series->x.push_back(paper.length);
    paper_ring.y.push_back(paper.ring_s);
    paper_tree.y.push_back(paper.tree_s);
    our_ring.y.push_back(ours.ring_s);
    our_tree.y.push_back(ours.tree_s);
    const auto f = [](double seconds) { return format_number(seconds); };
    rows.rows.push_back({fmt::format("{:.0f}", paper.length), f(paper.tree_s), f(ours.tree_s), f(paper.ring_s),
                         f(ours.ring_s), f(paper.ring_s / paper.tree_s), f(ours.ring_s / ours.tree_s),
                         f(paper.ring_s - paper.tree_s), f(ours.ring_s - ours.tree_s),
                         std::string(source_name(ours.source))});
  }
  figure.series = {paper_ring, paper_tree, our_ring, our_tree};
  out.figures.push_back(figure);
  out.tables.push_back(rows);
  add_comparisons(table, where, rows_of_ours, out);
}

void run_llama(ExperimentContext& context, Outcome& out) {
  const std::vector<LlamaTable> tables = {
      {"8b-h100",
       "llama-3.1-8b",
       "dgx-h100",
       8,
       {{32768, 0.60, 2.57}, {65536, 1.08, 4.42}, {131072, 2.68, 6.38}, {262144, 2.89, 8.19}}},
      {"8b-mi300x",
       "llama-3.1-8b",
       "mi300x",
       4,
       {{32768, 1.05, 3.57}, {65536, 2.36, 7.33}, {131072, 6.43, 16.40}, {262144, 15.30, 35.12}}},
      {"1b-4090",
       "llama-3.2-1b",
       "rtx4090",
       2,
       {{8000, 0.34, 1.38}, {16000, 0.58, 2.77}, {20000, 0.74, 3.47}, {32000, 1.01, 5.45}}}};
  for (const LlamaTable& table : tables) run_table(context, table, out);
  out.notes.push_back(
      "Ours: prefill as operations at the device's rate of 16-bit products, weights read once a token, and each "
      "layer's "
      "attention and exchange by `paper` and `ring`, nothing overlapping. No host, no Python: a lower bound.");
}

}  // namespace

std::vector<Experiment> llama_experiments() {
  return {{"llama", "Whole models: prefill and ten tokens",
           "Llama 3.1 8B on 8 H100 and on 4 MI300X, 32k to 256k tokens: tree is 2 to 4 times faster; Llama 3.2 1B on 2 "
           "RTX 4090, 8,000 to 32,000 tokens: 4 to 5 times.",
           run_llama}};
}

}  // namespace treeattn::tools
