// SPDX-License-Identifier: Apache-2.0
#include "bench_llama_steps.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "base/check.h"
#include "base/machine.h"
#include "base/timing.h"
#include "command.h"
#include "device_option.h"
#include "json_line.h"
#include "kernels/cuda/ranks/rank_device.h"
#include "model/activations.h"
#include "model/llama.h"
#include "model/memory_need.h"
#include "model_run.h"
#include "notes.h"
#include "parallel/kv_store.h"
#include "progress.h"
#include "table.h"

namespace treeattn::tools {
namespace {

using base::Clock, base::median, base::seconds_since;

// What was measured, and what it is measured against: bytes and bandwidth, or operations and their rate.
struct StepsLine {
  std::string what;
  std::int64_t tokens = 0, batch = 0;
  double seconds = 0, limit_seconds = 0;
  double read_gb_s = 0;  // a plain read, measured before it
  double ratio() const { return limit_seconds / seconds; }
};

class StepsRun {
 public:
  StepsRun(const StepsBench& bench, const ModelRank& rank)
      : bench_(bench), rank_(rank), config_(bench.plan.model.config) {
    if (rank.ops.gpu() >= 0) device_.emplace(rank.ops.gpu());
  }

  std::vector<StepsLine> run() {
    Progress progress("measuring", bench_.batches.size() * (1 + bench_.tokens.size()));
    read_ = read_bandwidth();
    for (const std::int64_t batch : bench_.batches) {
      progress.step("the matrices of a layer");
      measure_parts(batch);
    }
    for (const std::int64_t batch : bench_.batches) {
      for (const std::int64_t tokens : bench_.tokens) {
        progress.step(fmt::format("{} tokens", tokens));
        if (!has_room(batch, tokens, progress)) continue;
        if (!device_) read_ = read_bandwidth();  // a CPU's falls and rises with its clock
        measure_steps(batch, tokens);
      }
    }
    if (device_ && bench_.prefill > 0) measure_prefill();
    return std::move(lines_);
  }

  double product_tflops() const { return product_; }

 private:
  void add(std::string what, std::int64_t tokens, std::int64_t batch, double seconds, double limit) {
    lines_.push_back({std::move(what), tokens, batch, seconds, limit, read_});
  }

  double read_bandwidth() { return read_gb_s(rank_.ops.gpu(), base::usable_processors()); }

  // Waits until a GPU has done its work.
  void finish() {
    float ignored = 0;
    rank_.ops.to_host(&ignored, rank_.model.weights->final_norm(), sizeof ignored);
  }

  // Steps of all layers one after the other, so that no weight is in a cache when it is read again.
  template <class Work>
  double seconds_a_layer(const Work& work) {
    const std::vector<model::LayerWeights>& layers = rank_.model.weights->layers();
    double best = 0;
    for (int round = 0; round < 4; ++round) {  // the first warms up
      finish();
      const auto start = Clock::now();
      for (const model::LayerWeights& layer : layers) work(layer);
      finish();
      const double seconds = seconds_since(start) / static_cast<double>(layers.size());
      if (round > 0 && (best == 0 || seconds < best)) best = seconds;
    }
    return best;
  }

  void measure_parts(std::int64_t batch) {
    kernels::ModelOps& ops = rank_.ops;
    const model::Activations act(ops, config_, batch);
    ops.begin({kernels::Pass::kDecode, {}, {}, {}});
    const auto limit = [&](std::initializer_list<const kernels::WeightMatrix*> matrices) {
      double bytes = 0;
      for (const kernels::WeightMatrix* w : matrices) bytes += static_cast<double>(model::matrix_bytes(*w));
      return bytes / read_ * 1e-9;
    };
    const model::LayerWeights& w = rank_.model.weights->layers().front();
    add("q, k, v", 0, batch, seconds_a_layer([&](const model::LayerWeights& layer) { project(layer, act); }),
        limit({&w.q, &w.k, &w.v}));
    add("o", 0, batch, seconds_a_layer([&](const model::LayerWeights& layer) { add_attended(layer, act); }),
        limit({&w.o}));
    add("feed-forward", 0, batch, seconds_a_layer([&](const model::LayerWeights& layer) { feed_forward(layer, act); }),
        limit({&w.gate, &w.up, &w.down}));
  }

  // The parts of a layer beside attention, of all rows that the activations have room for.
  float eps() const { return static_cast<float>(config_.rms_eps); }
  void project(const model::LayerWeights& layer, const model::Activations& act) {
    const kernels::Projection qkv[] = {{layer.q, act.q.get()}, {layer.k, act.k.get()}, {layer.v, act.v.get()}};
    rank_.ops.norm_linear(act.x.get(), layer.attention_norm, eps(), act.rows, act.normed.get(), qkv);
  }
  void add_attended(const model::LayerWeights& layer, const model::Activations& act) {
    rank_.ops.linear(layer.o, act.attended.get(), act.rows, act.x.get(), true);
  }
  void feed_forward(const model::LayerWeights& layer, const model::Activations& act) {
    rank_.ops.feed_forward({layer.feed_forward_norm, eps(), layer.gate, layer.up, layer.down, act.normed.get(),
                            act.gate_up.get(), act.activated.get()},
                           act.rows, act.x.get());
  }

  // What is left beside the weights must hold the cache of all sequences; says so where it does not.
  bool has_room(std::int64_t batch, std::int64_t tokens, Progress& progress) const {
    const std::int64_t longest = bench_.longest(tokens);
    const std::size_t cache = model::memory_need(config_, bench_.plan.llama, bench_.plan.weights, longest, 1).cache;
    const std::size_t needed = cache * static_cast<std::size_t>(batch);
    const std::optional<std::size_t> available = usable_memory(rank_.ops.gpu());
    if (!available || needed <= *available) return true;
    progress.clear();
    print_note("skipped {} with {}: needs {} of cache, {} of memory can be used\n", format_count(batch, "sequence"),
               format_count(tokens, "token"), format_bytes(needed), format_bytes(*available));
    return false;
  }

  void measure_steps(std::int64_t batch, std::int64_t tokens) {
    constexpr std::int64_t kWarmUp = StepsBench::kWarmUp;
    tokens = bench_.longest(tokens) - kWarmUp - bench_.new_tokens;
    const auto llama = rank_.make_llama(bench_.plan.llama);
    std::vector<SequenceId> ids;
    for (std::int64_t i = 0; i < batch; ++i) {
      ids.push_back(llama->add_sequence());
      if (tokens > 0) llama->fill(ids.back(), tokens, static_cast<std::uint32_t>(i));
    }
    const std::vector<std::int32_t> said(ids.size(), 1);
    std::vector<double> seconds;
    for (std::int64_t step = 0; step < kWarmUp + bench_.new_tokens; ++step) {
      const auto start = Clock::now();
      llama->decode(ids, said);
      if (step >= kWarmUp) seconds.push_back(seconds_since(start));
    }
    const double kv =
        static_cast<double>(parallel::token_bytes(llama->cache().config()).all()) * static_cast<double>(config_.layers);
    const double middle = static_cast<double>(tokens + kWarmUp + bench_.new_tokens / 2);
    const double bytes =
        static_cast<double>(rank_.model.weights->bytes_per_token()) + kv * middle * static_cast<double>(batch);
    add("step", tokens, batch, median(std::move(seconds)), bytes / read_ * 1e-9);
  }

  // The matrices of a prompt alone, and all of it.
  void measure_prefill() {
    product_ = device_->product_rate(8192);
    const std::int64_t rows = bench_.prefill;
    kernels::ModelOps& ops = rank_.ops;
    const double flops = 2.0 * static_cast<double>(rows) *
                         static_cast<double>(model::weight_bytes_per_token(config_, WeightFormat::kBFloat16) / 2 -
                                             static_cast<std::size_t>(config_.vocab * config_.hidden));
    {
      const model::Activations act(ops, config_, rows);
      ops.begin({kernels::Pass::kPrefill, {}, {}, {}});
      const double seconds = seconds_a_layer([&](const model::LayerWeights& layer) {
        project(layer, act);
        add_attended(layer, act);
        feed_forward(layer, act);
      });
      add("matrices of a prompt", rows, 1, seconds * static_cast<double>(config_.layers), flops / product_ * 1e-12);
    }
    const auto llama = rank_.make_llama(bench_.plan.llama);
    const std::vector<std::int32_t> prompt(static_cast<std::size_t>(rows), 1);
    std::vector<float> logits(static_cast<std::size_t>(config_.vocab));
    double best = 0;
    for (int round = 0; round < 2; ++round) {
      const SequenceId id = llama->add_sequence();
      const auto start = Clock::now();
      llama->prefill(id, prompt, logits);
      best = seconds_since(start);
      llama->drop(id);
    }
    // Half of q K^T and half of w V: the mask.
    const double attention =
        2.0 * static_cast<double>(rows * rows) * static_cast<double>(config_.layers * config_.heads * config_.head_dim);
    add("prompt", rows, 1, best, (flops + attention) / product_ * 1e-12);
  }

  const StepsBench& bench_;
  const ModelRank& rank_;
  const model::LlamaConfig& config_;
  std::optional<kernels::cuda::RankDevice> device_;
  double read_ = 0, product_ = 0;
  std::vector<StepsLine> lines_;
};

void print_json(const StepsRun& run, const StepsLine& line) {
  nlohmann::ordered_json out;
  out["what"] = line.what;
  out["tokens"] = line.tokens;
  out["batch"] = line.batch;
  out["ms"] = 1e3 * line.seconds;
  out["limit_ms"] = 1e3 * line.limit_seconds;
  out["of_limit"] = line.ratio();
  out["read_gb_s"] = line.read_gb_s;
  if (run.product_tflops() > 0) out["product_tflops"] = run.product_tflops();
  fmt::print("{}\n", json_line(out));
}

}  // namespace

int bench_llama_steps(const StepsBench& bench) {
  const std::int64_t longest = bench.longest(*std::max_element(bench.tokens.begin(), bench.tokens.end()));
  return run_model(bench.plan, longest, [&](const ModelRank& rank) {
    base::require(rank.world->size() == 1, "--steps, or one rank on a GPU, with {} ranks; accepted: 1",
                  rank.world->size());
    StepsRun run(bench, rank);
    const std::vector<StepsLine> lines = run.run();
    if (bench.json) {
      for (const StepsLine& line : lines) print_json(run, line);
      return kOk;
    }
    fmt::print("{}; a plain read: {} GB/s", rank.ops.name(), format_number(lines.front().read_gb_s));
    if (run.product_tflops() > 0) fmt::print("; cuBLASLt, 8192^3: {} TFLOP/s", format_number(run.product_tflops()));
    fmt::print("\n\n");
    Table table({{"what", Align::kLeft}, {"tokens"}, {"batch"}, {"ms"}, {"limit ms"}, {"of limit"}});
    for (const StepsLine& line : lines) {
      table.add({line.what, fmt::format("{}", line.tokens), fmt::format("{}", line.batch),
                 format_number(1e3 * line.seconds), format_number(1e3 * line.limit_seconds),
                 fmt::format("{:.1f} %", 100 * line.ratio())});
    }
    table.print();
    return kOk;
  });
}

}  // namespace treeattn::tools
