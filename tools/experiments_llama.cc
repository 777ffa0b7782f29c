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

constexpr int kTokens = 10;
constexpr int kSteps = kTokens - 1;  // the prefill gives the first of them

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
  double tree_s = 0;
  double ring_s = 0;
  Source source = Source::kClosedForm;
  double gap_s() const { return ring_s - tree_s; }
};

// Products with every weight, and attention of every token to those before it, shared by the devices. The last matrix
// is left out: only the last token needs it.
double prefill_seconds(const plan::ModelSize& m, const plan::Cluster& cluster, int devices, double length) {
  const double products = 2.0 * static_cast<double>(m.read_weights - m.vocab * m.hidden) * length;
  const double attention = 4.0 * static_cast<double>(m.layers * m.heads * m.head_dim) * length * length / 2;
  return (products + attention) / (devices * cluster.device_flops_per_s);
}

// K and V have kv_heads heads: the model's, or one for every query head.
OurRow simulate_row(ExperimentContext& context, const LlamaTable& table, double length, std::int64_t kv_heads) {
  const plan::ModelSize m = model_size(find_model(table.model), DType::kBFloat16, DType::kBFloat16);
  const plan::Cluster cluster = plan::find_cluster(table.cluster);
  DecodePoint point;
  point.cluster = table.cluster;
  point.ranks = table.devices;
  point.ranks_per_node = std::min(table.devices, cluster.devices_per_node);
  point.heads = m.heads;
  point.kv_heads = kv_heads;
  point.head_dim = m.head_dim;
  point.tokens = static_cast<std::int64_t>(length);
  const auto layer_seconds = [&](Strategy strategy) {
    point.strategy = strategy;
    const DecodeTime time = context.times.at(point);
    return std::pair(time.us / 1e6, time.source);
  };
  OurRow row;
  const double prefill = prefill_seconds(m, cluster, table.devices, length);
  const double weights = static_cast<double>(m.read_weight_bytes) / cluster.device_bytes_per_s;
  const double layers = static_cast<double>(m.layers);
  const auto [tree, source] = layer_seconds(Strategy::kPaper);
  const double ring = layer_seconds(Strategy::kRing).first;
  row.tree_s = prefill + kSteps * (weights + layers * tree);
  row.ring_s = prefill + kSteps * (weights + layers * ring);
  row.source = source;
  return row;
}

// The same length twice: K and V of the model's KV heads, and repeated for every query head before they are attended to
// and sent, as the Llama of the authors' repository does it.
struct OurRows {
  OurRow grouped;
  OurRow repeated;
};

// Prefill, weights and Python are the same for both, so ring less tree is ring's messages less tree's collectives.
void add_comparisons(const LlamaTable& table, const std::string& where, const std::vector<OurRows>& ours,
                     Outcome& out) {
  const auto config = find_model(table.model);
  const double layers = static_cast<double>(config.layers), hops = kSteps * layers * (table.devices - 1);
  std::vector<double> length, hop_s;
  double paper_gap = 0, our_gap = 0, repeated_gap = 0;
  for (std::size_t i = 0; i < ours.size(); ++i) {
    const double gap = table.rows[i].ring_s - table.rows[i].tree_s;
    length.push_back(table.rows[i].length);
    hop_s.push_back(gap / hops);
    paper_gap += gap;
    our_gap += ours[i].grouped.gap_s();
    repeated_gap += ours[i].repeated.gap_s();
  }
  const plan::Line hop = plan::fit_line(length, hop_s);
  const double overhead = std::max(0.0, hop.offset);
  const double with = repeated_gap + overhead * hops * static_cast<double>(ours.size());
  const double token_bytes = 4.0 * static_cast<double>(config.heads * config.head_dim);  // K and V, bfloat16
  const PaperRow& last = table.rows.back();
  out.comparisons.push_back(
      {fmt::format("ring less tree at {:.0f} tokens, {}", last.length, where), last.ring_s - last.tree_s,
       ours.back().grouped.gap_s(), "s", ours.back().grouped.source,
       fmt::format("Over all lengths our links give {:.0f} % of the authors' gap; {:.0f} % with K and V repeated for "
                   "every query head before they are sent, as in the authors' repository; {:.0f} % with {:.2g} ms of "
                   "host time on every message of the ring as well. What grows with the share grows as if so many "
                   "bytes were sent at {:.3g} GB/s.",
                   100 * our_gap / paper_gap, 100 * repeated_gap / paper_gap, 100 * with / paper_gap, 1e3 * overhead,
                   token_bytes / table.devices / hop.slope / 1e9)});
  const PaperRow& first = table.rows.front();
  const OurRow& our_first = ours.front().grouped;
  out.comparisons.push_back(
      {fmt::format("tree at {:.0f} tokens, {}", first.length, where), first.tree_s, our_first.tree_s, "s",
       our_first.source,
       fmt::format(
           "Ours run at peak rates without a host; {:.2g} ms of host time a layer and token, switched on, would "
           "explain all of the difference.",
           1e3 * (first.tree_s - our_first.tree_s) / (kTokens * layers))});
}

void run_table(ExperimentContext& context, const LlamaTable& table, Outcome& out) {
  const std::string where = fmt::format("{}, {} devices of {}", table.model, table.devices, table.cluster);
  DataTable rows{fmt::format("{}: prefill and {} tokens, seconds", where, kTokens),
                 {"tokens", "tree, paper", "tree, ours", "ring, paper", "ring, ours", "ring / tree, paper", "ours",
                  "gap, paper", "gap, ours", "K and V repeated", "source"},
                 {}};
  Figure figure{fmt::format("llama-{}", table.id), where, {"tokens", true}, {"seconds", true}, {}};
  Series paper_ring{"ring", "ring", Source::kPaper, {}, {}}, paper_tree{"tree", "tree", Source::kPaper, {}, {}};
  Series our_ring{"ring", "ring", Source::kSimulated, {}, {}}, our_tree{"tree", "tree", Source::kSimulated, {}, {}};
  const auto config = find_model(table.model);
  std::vector<OurRows> rows_of_ours;
  for (const PaperRow& paper : table.rows) {
    const OurRow ours = simulate_row(context, table, paper.length, config.kv_heads);
    const OurRow repeated = simulate_row(context, table, paper.length, config.heads);
    rows_of_ours.push_back({ours, repeated});
    our_ring.source = our_tree.source = ours.source;
    for (Series* series : {&paper_ring, &paper_tree, &our_ring, &our_tree}) series->x.push_back(paper.length);
    paper_ring.y.push_back(paper.ring_s);
    paper_tree.y.push_back(paper.tree_s);
    our_ring.y.push_back(ours.ring_s);
    our_tree.y.push_back(ours.tree_s);
    const auto f = [](double seconds) { return format_number(seconds); };
    rows.rows.push_back({fmt::format("{:.0f}", paper.length), f(paper.tree_s), f(ours.tree_s), f(paper.ring_s),
                         f(ours.ring_s), f(paper.ring_s / paper.tree_s), f(ours.ring_s / ours.tree_s),
                         f(paper.ring_s - paper.tree_s), f(ours.gap_s()), f(repeated.gap_s()),
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
      "Ours: prefill as operations at the device's rate of 16-bit products, then nine steps, for it gives the first "
      "token: weights read once a step, and each layer's attention and exchange by `paper` and `ring`, nothing "
      "overlapping. No host, no Python: a lower bound. 32k is read as 32,768.");
}

}  // namespace

std::vector<Experiment> llama_experiments() {
  return {{"llama", "Whole models: prefill and ten tokens",
           "Llama 3.1 8B on 8 H100 and on 4 MI300X, 32k to 256k tokens: tree is 2 to 4 times faster; Llama 3.2 1B on 2 "
           "RTX 4090, 8,000 to 32,000 tokens: 4 to 5 times.",
           run_llama}};
}

}  // namespace treeattn::tools
