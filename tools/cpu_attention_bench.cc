// SPDX-License-Identifier: Apache-2.0
// One attention call on the CPU. Decode is held against the memory bandwidth, measured with as many threads right
// before and right after each line; prefill against the rate of multiply-adds.
//
// peak_bytes is what one call holds: K, V, q, out and what attention allocated on top, as counted by operator new.
#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "allocation_counter.h"
#include "attention_bench.h"
#include "base/fma_peak.h"
#include "base/machine.h"
#include "base/read_bandwidth.h"
#include "base/timing.h"
#include "bench_data.h"
#include "device_option.h"
#include "kernels/cpu/dispatch.h"
#include "table.h"
#include "treeattn/attention.h"

namespace treeattn::tools {
namespace {

constexpr int kLeastRepeats = 5;
constexpr int kMostRepeats = 100000;

// Everything that stays the same from line to line.
class CpuBench final : public AttentionBench {
 public:
  explicit CpuBench(const AttentionBenchOptions& options)
      : machine_(base::read_machine()),
        pool_(options.threads),
        probe_(pool_,
               options.quick ? base::ReadBandwidthProbe::kDefaultBytes / 4 : base::ReadBandwidthProbe::kDefaultBytes),
        options_(options) {}

  std::string device() const override { return "cpu"; }

  std::string lack(const Shape& shape) const override {
    const std::size_t needed = BenchData::bytes(shape, sets(shape));
    const std::optional<std::size_t> room = usable_memory(KvCache::kHost);
    if (!room || needed <= *room) return "";
    return fmt::format("needs {}, {} of memory can be used", format_bytes(needed), format_bytes(*room));
  }

  AttentionLine measure(const Shape& shape) override {
    BenchData data(shape, sets(shape), options_.seed, pool_);
    AttentionLine line;
    line.shape = shape;
    line.isa = active_isa();
    line.peak_bytes = shape.kv_bytes() + shape.q_bytes() + shape.out_bytes() + extra_bytes(data, shape);
    const double first = one_call(data, shape, 2);
    const Limits before = limits(shape, first);
    const double seconds = median_seconds(data, shape, first);
    const Limits after = limits(shape, first);
    line.fill_in(seconds, std::max(before.gb_s, after.gb_s), std::max(before.gflops, after.gflops));
    return line;
  }

 private:
  // The copies of K and V that a line rotates over.
  std::size_t sets(const Shape& shape) const {
    return is_prefill(shape) ? 1 : cold_sets(shape, machine_.last_cache_bytes());
  }

  double one_call(BenchData& data, const Shape& shape, std::size_t set) {
    const AttentionInput in = data.input(set);
    AttentionOptions options;
    options.causal = shape.causal;
    const auto start = base::Clock::now();
    attention(in, options, data.out(), {}, pool_);
    return base::seconds_since(start);
  }

  // What one call allocates at its peak. The first call comes before, so that what is made once is not counted.
  std::size_t extra_bytes(BenchData& data, const Shape& shape) {
    one_call(data, shape, 0);
    const AllocationWatch watch;
    one_call(data, shape, 1);
    return watch.peak();
  }

  // `first`: what a call took before.
  double median_seconds(BenchData& data, const Shape& shape, double first) {
    const double seconds = options_.quick ? 0.2 : 1.0;
    const int automatic = static_cast<int>(std::clamp(seconds / first, 1.0 * kLeastRepeats, 1.0 * kMostRepeats));
    std::vector<double> times(static_cast<std::size_t>(options_.repeat > 0 ? options_.repeat : automatic));
    for (std::size_t i = 0; i < times.size(); ++i) times[i] = one_call(data, shape, i + 3);
    return base::median(std::move(times));
  }

  struct Limits {
    double gb_s = 0;
    double gflops = 0;  // prefill only
  };

  // What the machine can do at best, at this moment, for as long as a call takes (2 s at most).
  Limits limits(const Shape& shape, double call_seconds) {
    Limits out;
    out.gb_s = probe_.measure(pool_, kLeastRepeats);
    if (!is_prefill(shape)) return out;
    const kernels::CpuTarget& target = kernels::active_target();
    out.gflops = base::fma_peak_gflops(
        pool_, [&](long n) { return kernels::prefill_burst(target, shape.dtype, n); }, std::min(call_seconds, 2.0));
    return out;
  }

  base::Machine machine_;
  ThreadPool pool_;
  base::ReadBandwidthProbe probe_;
  AttentionBenchOptions options_;
};

}  // namespace

std::unique_ptr<AttentionBench> cpu_attention_bench(const AttentionBenchOptions& options) {
  return std::make_unique<CpuBench>(options);
}

}  // namespace treeattn::tools
