// SPDX-License-Identifier: Apache-2.0
// treeattn bench attention: the time of one attention call, and how close that is to what the machine can do at best.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "attention_bench.h"
#include "base/machine.h"
#include "command.h"
#include "device_option.h"
#include "json_line.h"
#include "kernels/cuda/ranks/rank_device.h"
#include "notes.h"
#include "options.h"
#include "progress.h"
#include "table.h"
#include "treeattn/attention.h"
#include "treeattn/thread_pool.h"

namespace treeattn::tools {
namespace {

constexpr int kMostRepeats = 100000;

struct BenchOptions {
  ShapeOptions shape;
  std::string device;
  std::string threads;
  std::string repeat;
  std::string seed;
  bool quick = false;
  bool json = false;
};

// What is measured when no shape is asked for: decode with as many KV heads as heads and with a quarter, one length
// that suits a chat and one that suits a book; and a prefill.
std::vector<Shape> default_sweep(bool quick) {
  std::vector<Shape> out;
  for (const auto& [heads, kv_heads] : {std::pair{16, 16}, std::pair{32, 8}}) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32, DType::kInt8}) {
      for (const std::int64_t tokens : {8192, 131072}) {
        if (quick && tokens > 8192) continue;
        Shape shape;
        shape.heads = heads;
        shape.kv_heads = kv_heads;
        shape.dtype = dtype;
        shape.q_dtype = default_q_dtype(dtype);
        shape.tokens = tokens;
        out.push_back(shape);
      }
    }
  }
  Shape prefill;
  prefill.dtype = prefill.q_dtype = DType::kFloat32;
  prefill.tokens = prefill.queries = quick ? 1024 : 4096;
  prefill.causal = true;
  out.push_back(prefill);
  return out;
}

std::string heads_text(const Shape& shape) {
  std::string out = fmt::format("{}/{}x{}", shape.heads, shape.kv_heads, shape.head_dim);
  if (shape.batch > 1) out = fmt::format("{}*{}", shape.batch, out);
  return out;
}

std::string tokens_text(const Shape& shape) {
  std::string out = fmt::format("{}", shape.tokens);
  if (shape.shortest > 0) out = fmt::format("{}-{}", shape.shortest, out);
  if (shape.page_tokens > 0) out += fmt::format("/{}", shape.page_tokens);
  return out;
}

std::string queries_text(const Shape& shape) { return fmt::format("{}{}", shape.queries, shape.causal ? "c" : ""); }

// On a GPU its kernel stands where the CPU has its threads.
std::vector<Column> columns(bool on_gpu, const std::vector<Shape>& shapes) {
  std::size_t heads = 9, tokens = 7, queries = 7;
  for (const Shape& shape : shapes) {
    heads = std::max(heads, heads_text(shape).size());
    tokens = std::max(tokens, tokens_text(shape).size());
    queries = std::max(queries, queries_text(shape).size());
  }
  return {{"heads", Align::kLeft, heads},
          {"dtype", Align::kLeft, 8},
          {"tokens", Align::kRight, tokens},
          {"queries", Align::kRight, queries},
          {on_gpu ? "kernel" : "threads", Align::kRight, 7},
          {"ms", Align::kRight, 8},
          {"rate", Align::kRight, 12},
          {"limit", Align::kRight, 12},
          {"ratio", Align::kRight, 6},
          {"peak", Align::kRight, 10},
          {"formula", Align::kRight, 10}};
}

// Always in one unit, as columns are there to be compared; with two digits that count where one would be 0.0.
std::string in_units(double amount, const char* unit) {
  return amount >= 1 ? fmt::format("{:.1f} {}", amount, unit) : fmt::format("{:.2g} {}", amount, unit);
}
std::string gigabytes(double rate) { return in_units(rate, "GB/s"); }
std::string mebibytes(std::size_t bytes) { return in_units(static_cast<double>(bytes) / (1 << 20), "MiB"); }

std::vector<std::string> cells(const AttentionLine& line, const std::string& by) {
  const Shape& shape = line.shape;
  const bool memory = !line.gflops.has_value();
  return {heads_text(shape),
          std::string(dtype_name(shape.dtype)),
          tokens_text(shape),
          queries_text(shape),
          by,
          format_number(line.ms),
          memory ? gigabytes(line.gb_s) : fmt::format("{:.0f} GFLOP/s", *line.gflops),
          memory ? gigabytes(line.limit_gb_s) : fmt::format("{:.0f} GFLOP/s", line.peak_gflops),
          fmt::format("{:.1f}%", 100 * line.ratio),
          mebibytes(line.peak_bytes),
          mebibytes(line.formula_bytes)};
}

void print_json(const AttentionLine& line, const std::string& device, int threads) {
  const Shape& shape = line.shape;
  nlohmann::ordered_json out;
  out["device"] = device;
  out["isa"] = line.isa;
  out["threads"] = threads;
  out["batch"] = shape.batch;
  out["heads"] = shape.heads;
  out["kv_heads"] = shape.kv_heads;
  out["head_dim"] = shape.head_dim;
  out["dtype"] = dtype_name(shape.dtype);
  out["tokens"] = shape.tokens;
  out["queries"] = shape.queries;
  out["ms"] = line.ms;
  out["gb_s"] = line.gb_s;
  out["limit_gb_s"] = line.limit_gb_s;
  out["ratio"] = line.ratio;
  out["peak_bytes"] = line.peak_bytes;
  out["formula_bytes"] = line.formula_bytes;
  if (line.gflops) {
    out["gflops"] = *line.gflops;
    out["peak_gflops"] = line.peak_gflops;
  }
  if (shape.page_tokens > 0) out["page_tokens"] = shape.page_tokens;
  if (shape.shortest > 0) out["shortest"] = shape.shortest;
  fmt::print("{}\n", json_line(out));
  std::fflush(stdout);
}

int run(const BenchOptions& options) {
  const Device device = parse_device(options.device);
  const std::vector<Shape> shapes = options.shape.any() ? options.shape.shapes() : default_sweep(options.quick);
  const int cores = ThreadPool::available_cores();
  AttentionBenchOptions how;
  how.threads = parse_count_or("--threads", options.threads, 1, 4096, cores);
  how.repeat = parse_count_or("--repeat", options.repeat, 1, kMostRepeats, 0);
  how.seed = static_cast<std::uint64_t>(parse_count_or("--seed", options.seed, 0, 1 << 30, 1));
  how.quick = options.quick;
  const std::string_view isa = active_isa();  // a wrong TREEATTN_ISA is reported before any waiting
  if (device.on_gpu()) kernels::cuda::stay_on_gpu(device.gpus.front());
  const std::unique_ptr<AttentionBench> bench =
      device.on_gpu() ? gpu_attention_bench(how, device.gpus.front()) : cpu_attention_bench(how);

  Table table(columns(device.on_gpu(), shapes));
  if (!options.json) {
    if (device.on_gpu()) {
      fmt::print("{}\n\n", bench->device());
    } else {
      fmt::print("{}, {}, threads: {}, cores: {}\n\n", base::read_machine().cpu_model, isa, how.threads, cores);
    }
    table.print_header();
  }
  Progress progress("bench", shapes.size());
  std::size_t skipped = 0;
  for (const Shape& shape : shapes) {
    const std::string name = fmt::format("{} {} {} tokens", heads_text(shape), dtype_name(shape.dtype), shape.tokens);
    progress.step(name);
    if (const std::string lack = bench->lack(shape); !lack.empty()) {
      progress.clear();
      print_note("skipped {}: {}\n", name, lack);
      ++skipped;
      continue;
    }
    const AttentionLine line = bench->measure(shape);
    progress.clear();
    options.json ? print_json(line, bench->device(), device.on_gpu() ? 1 : how.threads)
                 : table.print_row(cells(line, device.on_gpu() ? line.isa : fmt::format("{}", how.threads)));
  }
  return skipped == shapes.size() ? kUnavailable : kOk;
}

constexpr char kFooter[] = R"(Without a shape option:
  decode with 16/16 and 32/8 heads of 128, four types, 8192 and 131072 tokens; and a prefill.

Columns:
  heads    query heads / KV heads x elements of a head; 32*: so many sequences
  tokens   keys; 1024-131072: sequences of mixed lengths; /16: in pages of 16
  queries  query tokens per sequence; c: causal
  rate     decode: bytes of K and V over the time; prefill (more than 16 queries): arithmetic over the time
  limit    the same for plain reading with as many threads (on a GPU: of as many bytes), or for multiply-adds alone
           (on a GPU: mma.sync, but for float32); measured beside the line
  peak     bytes one call holds: K, V, q, out and what attention allocates
  formula  the same by the paper's formula, in elements of the cache's type

Examples:
  treeattn bench attention
  treeattn bench attention --quick --json
  treeattn bench attention --heads 32 --kv-heads 8,4 --dtype bf16,int8 --tokens 8k,128k
  treeattn bench attention --heads 16 --tokens 4096 --queries 4096 --causal --dtype f32 --threads 1
  treeattn bench attention --device cuda --heads 32 --kv-heads 8 --tokens 128k,640k
  treeattn bench attention --device cuda --heads 32 --kv-heads 8 --batch 32 --lengths 1k:128k --page 16)";

}  // namespace

Command add_bench_attention(CommandLine& parent) {
  CommandLine* app = parent.add_subcommand("attention", "Attention on this processor or a GPU, against its limits");
  auto options = std::make_shared<BenchOptions>();
  options->shape.add_to(*app);
  options->shape.add_layout_to(*app);
  add_device_option(*app, options->device);
  app->add_option("--threads", options->threads,
                  "Threads; with a GPU, those that make the numbers (default: all cores)")
      ->type_name("N");
  app->add_option("--repeat", options->repeat, "Calls per line; the median counts (default: one second, at least 5)")
      ->type_name("N");
  app->add_option("--seed", options->seed, "Of the random numbers (default 1)")->type_name("N");
  app->add_flag("--quick", options->quick, "A fifth of the time per line, and only short sequences unless asked for");
  app->add_flag("--json", options->json, "One JSON object a line; docs/cli.md explains the keys");
  app->footer(kFooter);
  return {app, [options] { return run(*options); }};
}

}  // namespace treeattn::tools
