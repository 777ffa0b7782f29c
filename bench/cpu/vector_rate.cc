// SPDX-License-Identifier: Apache-2.0
// How many vector instructions this processor holds for a second, and what share of the read bandwidth they leave to
// decode attention (docs/cpu_notes.md, "The limit: instructions against bytes").
// usage: vector_rate [--json] [--quick]      exit status 77: another architecture than aarch64 and x86-64
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/fma_peak.h"
#include "base/machine.h"
#include "base/read_bandwidth.h"
#include "cpu/vector_loops.h"
#include "treeattn/thread_pool.h"

namespace treeattn::bench {
namespace {

constexpr int kSkipped = 77;
constexpr int kReadings = 7;
constexpr double kBytes = 32;  // of K and V, that instructions are counted for

struct Settings {
  bool json = false;
  double seconds = 1;
  int bursts = 3;
};

// Of one instruction, or of the clock: 1e9 a second of all threads together.
struct Measured {
  std::string_view name;
  base::BurstRate one, all;
};

using Rates = std::vector<Measured>;

// Seconds for 1e9 times the instructions, at the rate `pick` chooses; nothing where one of them was not measured.
std::optional<double> time_of(const std::vector<InstructionCount>& counts, const Rates& rates,
                              double base::BurstRate::*pick) {
  double sum = 0;
  for (const InstructionCount& part : counts) {
    const auto found = std::find_if(rates.begin(), rates.end(), [&](const Measured& m) { return m.name == part.name; });
    if (found == rates.end()) return std::nullopt;
    sum += part.count / (found->all.*pick);
  }
  return sum;
}

// Of the read bandwidth, that the instructions leave; 1 and more: they do not hold it up.
std::optional<double> share(const KernelCount& kernel, const Rates& rates, double base::BurstRate::*pick,
                            double read_gb_s) {
  const auto k = time_of(kernel.k, rates, pick), v = time_of(kernel.v, rates, pick);
  if (!k || !v) return std::nullopt;
  return kBytes / (*k + *v) / read_gb_s;
}

std::string listed(const std::vector<InstructionCount>& counts) {
  std::string out;
  for (const auto& [name, count] : counts) out += fmt::format("{}{} {}", out.empty() ? "" : ", ", count, name);
  return out;
}

double sum_of(const KernelCount& kernel) {
  double sum = 0;
  for (const auto* part : {&kernel.k, &kernel.v}) {
    for (const InstructionCount& item : *part) sum += item.count;
  }
  return sum;
}

std::string percent(std::optional<double> part) {
  if (!part) return "-";
  return *part > 1 ? "> 100 %" : fmt::format("{:.0f} %", 100 * *part);
}

class Report {
 public:
  Report(const Settings& settings, ThreadPool& pool) : settings_(settings), pool_(pool), probe_(pool) {
    const base::Machine machine = base::read_machine();
    clock_ = measure("clock", clock_burst());
    if (settings_.json) {
      const nlohmann::ordered_json line = {{"machine", machine.cpu_model},   {"architecture", machine.architecture},
                                           {"threads", pool_.size()},        {"burst_s", settings_.seconds},
                                           {"bursts", settings_.bursts},     {"clock_one_ghz", clock_.one.median},
                                           {"clock_all_ghz", clock_of_all()}};
      fmt::print("{}\n", line.dump());
      return;
    }
    fmt::print(
        "{}, {}, threads: {}, clock {:.2f} GHz with one, {:.2f} with all; bursts of {} s: median (least to best) of "
        "{}\n\n",
        machine.cpu_model, machine.architecture, pool_.size(), clock_.one.median, clock_of_all(), settings_.seconds,
        settings_.bursts);
    fmt::print("{:12} {:>23} {:>20} {:>23} {:>20}\n", "instruction", "one thread, 1e9/s", "a cycle",
               "all threads, 1e9/s", "a cycle and core");
  }

  void instruction(const VectorLoop& loop) {
    if (!loop.usable) {
      if (!settings_.json) fmt::print("{:12} not on this processor\n", loop.name);
      return;
    }
    const Measured m = measure(loop.name, loop.burst);
    rates_.push_back(m);
    const double one = clock_.one.median, all = clock_.all.median;  // of all cores together
    if (settings_.json) {
      const nlohmann::ordered_json line = {{"instruction", m.name},
                                           {"one_thread", m.one.median},
                                           {"one_thread_least", m.one.least},
                                           {"one_thread_best", m.one.best},
                                           {"one_thread_per_cycle", m.one.median / one},
                                           {"all_threads", m.all.median},
                                           {"all_threads_least", m.all.least},
                                           {"all_threads_best", m.all.best},
                                           {"all_threads_per_cycle", m.all.median / all}};
      fmt::print("{}\n", line.dump());
    } else {
      const auto pair = [](const base::BurstRate& rate, double unit) {
        return fmt::format("{:.2f} ({:.2f} to {:.2f})", rate.median / unit, rate.least / unit, rate.best / unit);
      };
      fmt::print("{:12} {:>23} {:>20} {:>23} {:>20}\n", m.name, pair(m.one, 1), pair(m.one, one), pair(m.all, 1),
                 pair(m.all, all));
    }
    std::fflush(stdout);
  }

  void shares() {
    const double reading = probe_.measure(pool_, kReadings);
    if (settings_.json) {
      fmt::print("{}\n", nlohmann::ordered_json({{"read_gb_s", reading}}).dump());
    } else {
      fmt::print("\nreading, all threads: {:.1f} GB/s\n", reading);
    }
    const std::vector<KernelCount> kernels = kernel_counts();
    if (kernels.empty() && !settings_.json)
      fmt::print("the kernels' instructions are not counted on this architecture\n");
    if (!kernels.empty() && !settings_.json) {
      fmt::print("\n{:9} {:>5}  {:20} {:22} {:>5} {:>9} {:>9} {:>9}\n", "K and V", "group", "for 16 bytes of K",
                 "for 16 bytes of V", "sum", "share", "at least", "at best");
    }
    for (const KernelCount& kernel : kernels) {
      const auto held = share(kernel, rates_, &base::BurstRate::median, reading);
      const auto least = share(kernel, rates_, &base::BurstRate::least, reading);
      const auto best = share(kernel, rates_, &base::BurstRate::best, reading);
      if (settings_.json) {
        nlohmann::ordered_json line = {
            {"dtype", dtype_name(kernel.dtype)}, {"group", kernel.group}, {"instructions", sum_of(kernel)}};
        const auto number = [](std::optional<double> x) { return x ? nlohmann::ordered_json(*x) : nullptr; };
        line["share"] = number(held), line["share_least"] = number(least), line["share_best"] = number(best);
        fmt::print("{}\n", line.dump());
      } else {
        fmt::print("{:9} {:5}  {:20} {:22} {:5} {:>9} {:>9} {:>9}\n", dtype_name(kernel.dtype), kernel.group,
                   listed(kernel.k), listed(kernel.v), sum_of(kernel), percent(held), percent(least), percent(best));
      }
    }
  }

 private:
  Measured measure(std::string_view name, double (*burst)(long)) {
    const auto rate = [&](int threads) {
      return base::burst_rate(pool_, threads, burst, settings_.seconds, settings_.bursts);
    };
    const base::BurstRate one = rate(1);
    return {name, one, pool_.size() > 1 ? rate(pool_.size()) : one};
  }
  double clock_of_all() const { return clock_.all.median / pool_.size(); }

  Settings settings_;
  ThreadPool& pool_;
  base::ReadBandwidthProbe probe_;
  Measured clock_;
  Rates rates_;
};

int run(const std::vector<std::string_view>& arguments) {
  Settings settings;
  for (const std::string_view argument : arguments) {
    if (argument == "--json") {
      settings.json = true;
    } else if (argument == "--quick") {
      settings.seconds = 0.1;
    } else {
      fmt::print(stderr, "vector_rate: argument \"{}\"; accepted: --json, --quick (bursts of 0.1 s)\n", argument);
      return 2;
    }
  }
  const std::vector<VectorLoop> loops = vector_loops();
  if (loops.empty()) {
    fmt::print(stderr, "vector_rate: no loops for {}; there are some for aarch64 and x86-64\n",
               base::read_machine().architecture);
    return kSkipped;
  }
  ThreadPool pool(ThreadPool::available_cores());
  Report report(settings, pool);
  for (const VectorLoop& loop : loops) report.instruction(loop);
  report.shares();
  return 0;
}

}  // namespace
}  // namespace treeattn::bench

int main(int argc, char** argv) {
  try {
    return treeattn::bench::run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    fmt::print(stderr, "vector_rate: {}\n", error.what());
    return 1;
  }
}
