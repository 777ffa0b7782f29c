// SPDX-License-Identifier: Apache-2.0
// treeattn bench attention: the time of one attention call, and how close that is to what the machine can do at best.
//
// Decode (few queries) reads K and V once and does little else, so its limit is the memory bandwidth, measured with as
// many threads right before and right after each line. Prefill (more than kDecodeQueries) is limited by arithmetic, so
// its limit is the measured rate of multiply-adds.
//
// peak_bytes is what one call holds: K, V, q, out and what attention allocated on top, as counted by operator new.
// formula_bytes is the paper's 2btd + 2bd + 2b n_h elements of the cache's type, for b sequences of t tokens: 2btd is K
// and V, and there d is kv_heads * head_dim; 2bd is q and out, with d = heads * head_dim; 2b n_h is max and sum. With
// several query tokens the last two are per query.
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "allocation_counter.h"
#include "base/fma_peak.h"
#include "base/machine.h"
#include "base/read_bandwidth.h"
#include "bench_data.h"
#include "command.h"
#include "kernels/cpu/dispatch.h"
#include "options.h"
#include "progress.h"
#include "table.h"
#include "treeattn/attention.h"
#include "treeattn/error.h"

namespace treeattn::tools {
namespace {

constexpr std::int64_t kDecodeQueries = 16;  // up to this many query tokens a call is limited by memory
constexpr int kLeastRepeats = 5;
constexpr int kMostRepeats = 100000;

struct BenchOptions {
  ShapeOptions shape;
  std::string threads;
  std::string repeat;
  std::string seed;
  bool quick = false;
  bool json = false;
};

struct Line {
  Shape shape;
  double ms = 0;
  double gb_s = 0;
  double limit_gb_s = 0;
  double ratio = 0;  // of the limit that applies
  std::size_t peak_bytes = 0;
  std::size_t formula_bytes = 0;
  std::optional<double> gflops;
  double peak_gflops = 0;
};

bool is_prefill(const Shape& shape) { return shape.queries > kDecodeQueries; }

std::size_t formula_bytes(const Shape& s) {
  const std::int64_t kv = 2 * s.batch * s.tokens * s.kv_heads * s.head_dim;
  const std::int64_t rows = 2 * s.batch * s.queries * s.heads;
  return static_cast<std::size_t>(kv + rows * s.head_dim + rows) * dtype_size(s.dtype);
}

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

// Everything that stays the same from line to line.
class Bench {
 public:
  Bench(int threads, int repeat, std::uint64_t seed, bool quick)
      : machine_(base::read_machine()),
        pool_(threads),
        probe_(pool_, quick ? base::ReadBandwidthProbe::kDefaultBytes / 4 : base::ReadBandwidthProbe::kDefaultBytes),
        repeat_(repeat),
        seed_(seed),
        seconds_(quick ? 0.2 : 1.0) {}

  int threads() const { return pool_.size(); }

  // The copies of K and V that a line rotates over.
  std::size_t sets(const Shape& shape) const {
    return is_prefill(shape) ? 1 : cold_sets(shape, machine_.last_cache_bytes());
  }

  Line measure(const Shape& shape) {
    BenchData data(shape, sets(shape), seed_, pool_);
    Line line;
    line.shape = shape;
    line.formula_bytes = formula_bytes(shape);
    line.peak_bytes = shape.kv_bytes() + shape.q_bytes() + shape.out_bytes() + extra_bytes(data, shape);
    const Limits before = limits(shape);
    const double seconds = median_seconds(data, shape);
    const Limits after = limits(shape);
    line.ms = 1e3 * seconds;
    line.gb_s = 1e-9 * static_cast<double>(shape.kv_bytes()) / seconds;
    line.limit_gb_s = std::max(before.gb_s, after.gb_s);
    line.ratio = line.gb_s / line.limit_gb_s;
    if (is_prefill(shape)) {
      const double pairs = shape.visible_pairs() * static_cast<double>(shape.heads);
      line.gflops = 1e-9 * 4 * pairs * static_cast<double>(shape.head_dim) / seconds;
      line.peak_gflops = std::max(before.gflops, after.gflops);
      line.ratio = *line.gflops / line.peak_gflops;
    }
    return line;
  }

 private:
  double one_call(BenchData& data, const Shape& shape, std::size_t set) {
    const AttentionInput in = data.input(set);
    AttentionOptions options;
    options.causal = shape.causal;
    const auto start = std::chrono::steady_clock::now();
    attention(in, options, data.out(), {}, pool_);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

  // What one call allocates at its peak. The first call comes before, so that what is made once is not counted.
  std::size_t extra_bytes(BenchData& data, const Shape& shape) {
    one_call(data, shape, 0);
    base::AllocationMeter& meter = program_allocations();
    const std::size_t before = meter.current();
    meter.reset_peak();
    one_call(data, shape, 1);
    return meter.peak() - before;
  }

  double median_seconds(BenchData& data, const Shape& shape) {
    const double first = one_call(data, shape, 2);
    const int automatic = static_cast<int>(std::clamp(seconds_ / first, 1.0 * kLeastRepeats, 1.0 * kMostRepeats));
    std::vector<double> times(static_cast<std::size_t>(repeat_ > 0 ? repeat_ : automatic));
    for (std::size_t i = 0; i < times.size(); ++i) times[i] = one_call(data, shape, i + 3);
    std::sort(times.begin(), times.end());
    const std::size_t middle = times.size() / 2;
    return times.size() % 2 == 1 ? times[middle] : (times[middle - 1] + times[middle]) / 2;
  }

  struct Limits {
    double gb_s = 0;
    double gflops = 0;  // prefill only
  };

  // What the machine can do at best, at this moment.
  Limits limits(const Shape& shape) {
    Limits out;
    out.gb_s = probe_.measure(pool_, kLeastRepeats).best;
    if (!is_prefill(shape)) return out;
    const kernels::CpuTarget& target = kernels::active_target();
    out.gflops = base::fma_peak_gflops(pool_, [&](long n) { return kernels::fma_burst(target, n); });
    return out;
  }

  base::Machine machine_;
  ThreadPool pool_;
  base::ReadBandwidthProbe probe_;
  int repeat_;  // 0: as many as fit in seconds_
  std::uint64_t seed_;
  double seconds_;
};

std::vector<Column> columns() {
  return {{"heads", Align::kLeft, 9},    {"dtype", Align::kLeft, 8},    {"tokens", Align::kRight, 7},
          {"queries", Align::kRight, 7}, {"threads", Align::kRight, 7}, {"ms", Align::kRight, 8},
          {"rate", Align::kRight, 12},   {"limit", Align::kRight, 12},  {"ratio", Align::kRight, 6},
          {"peak", Align::kRight, 10},   {"formula", Align::kRight, 10}};
}

std::string heads_text(const Shape& shape) {
  std::string out = fmt::format("{}/{}x{}", shape.heads, shape.kv_heads, shape.head_dim);
  if (shape.batch > 1) out = fmt::format("{}*{}", shape.batch, out);
  return out;
}

// Always in one unit: the two columns are there to be compared.
std::string mebibytes(std::size_t bytes) { return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / (1 << 20)); }

std::vector<std::string> cells(const Line& line, int threads) {
  const Shape& shape = line.shape;
  const bool memory = !line.gflops.has_value();
  return {heads_text(shape),
          std::string(dtype_name(shape.dtype)),
          fmt::format("{}", shape.tokens),
          fmt::format("{}{}", shape.queries, shape.causal ? "c" : ""),
          fmt::format("{}", threads),
          format_number(line.ms),
          memory ? fmt::format("{:.1f} GB/s", line.gb_s) : fmt::format("{:.0f} GFLOP/s", *line.gflops),
          memory ? fmt::format("{:.1f} GB/s", line.limit_gb_s) : fmt::format("{:.0f} GFLOP/s", line.peak_gflops),
          fmt::format("{:.1f}%", 100 * line.ratio),
          mebibytes(line.peak_bytes),
          mebibytes(line.formula_bytes)};
}

void print_json(const Line& line, int threads) {
  const Shape& shape = line.shape;
  nlohmann::ordered_json out;
  out["device"] = "cpu";
  out["isa"] = active_isa();
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
  fmt::print("{}\n", out.dump());
  std::fflush(stdout);
}

int run(const BenchOptions& options) {
  const std::vector<Shape> shapes = options.shape.any() ? options.shape.shapes() : default_sweep(options.quick);
  const int cores = ThreadPool::available_cores();
  const auto number = [](const char* name, const std::string& text, int least, int most, int otherwise) {
    return text.empty() ? otherwise : static_cast<int>(parse_count(name, text, least, most));
  };
  const int threads = number("--threads", options.threads, 1, 4096, cores);
  const int repeat = number("--repeat", options.repeat, 1, kMostRepeats, 0);
  const int seed = number("--seed", options.seed, 0, 1 << 30, 1);
  const std::string_view isa = active_isa();
  Bench bench(threads, repeat, static_cast<std::uint64_t>(seed), options.quick);

  Table table(columns());
  if (!options.json) {
    fmt::print("{}, {}, threads: {}, cores: {}\n\n", base::read_machine().cpu_model, isa, threads, cores);
    table.print_header();
  }
  Progress progress("bench", shapes.size());
  std::size_t skipped = 0;
  for (const Shape& shape : shapes) {
    const std::string name = fmt::format("{} {} {} tokens", heads_text(shape), dtype_name(shape.dtype), shape.tokens);
    progress.step(name);
    const std::size_t needed = BenchData::bytes(shape, bench.sets(shape));
    const std::size_t room = base::available_memory() / 10 * 9;
    if (room != 0 && needed > room) {
      progress.clear();
      fmt::print(stderr, "skipped {}: needs {}, {} of memory can be used\n", name, format_bytes(needed),
                 format_bytes(room));
      ++skipped;
      continue;
    }
    const Line line = bench.measure(shape);
    progress.clear();
    options.json ? print_json(line, threads) : table.print_row(cells(line, threads));
  }
  return skipped == shapes.size() ? kUnavailable : kOk;
}

constexpr char kFooter[] = R"(Without a shape option:
  decode with 16/16 and 32/8 heads of 128, four types, 8192 and 131072 tokens; and a prefill.

Columns:
  heads    query heads / KV heads x elements of a head
  queries  query tokens per sequence; c: causal
  rate     decode: bytes of K and V over the time; prefill (more than 16 queries): arithmetic over the time
  limit    the same for plain reading with as many threads, or for multiply-adds alone; measured beside the line
  peak     bytes one call holds: K, V, q, out and what attention allocates
  formula  the same by the paper's formula, in elements of the cache's type

Examples:
  treeattn bench attention
  treeattn bench attention --quick --json
  treeattn bench attention --heads 32 --kv-heads 8,4 --dtype bf16,int8 --tokens 8k,128k
  treeattn bench attention --heads 16 --tokens 4096 --queries 4096 --causal --dtype f32 --threads 1)";

}  // namespace

Command add_bench_attention(CLI::App& parent) {
  CLI::App* app = parent.add_subcommand("attention", "Attention on this processor, against its limits");
  auto options = std::make_shared<BenchOptions>();
  options->shape.add_to(*app);
  options->shape.add_layout_to(*app);
  app->add_option("--threads", options->threads, "Threads (default: all cores)")->type_name("N");
  app->add_option("--repeat", options->repeat, "Calls per line; the median counts (default: one second, at least 5)")
      ->type_name("N");
  app->add_option("--seed", options->seed, "Of the random numbers (default 1)")->type_name("N");
  app->add_flag("--quick", options->quick, "A fifth of the time per line, and only short sequences unless asked for");
  app->add_flag("--json", options->json, "One JSON object a line; docs/cli.md explains the keys");
  app->footer(kFooter);
  return {app, [options] { return run(*options); }};
}

}  // namespace treeattn::tools
