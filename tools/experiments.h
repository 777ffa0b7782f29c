// SPDX-License-Identifier: Apache-2.0
// The paper's results and what we add to them, each an item of one list: what the paper says and how to get ours.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "decode_times.h"
#include "outcome.h"

namespace treeattn::tools {

struct ExperimentContext {
  DecodeTimes& times;
  bool quick = false;  // smaller sizes: for a test, not for a claim
};

struct Experiment {
  std::string_view name;
  std::string_view title;
  std::string_view paper;  // what the paper says; for what goes beyond it, what is asked
  // Fills in figures, tables, comparisons, targets and notes.
  std::function<void(ExperimentContext&, Outcome&)> run;
};

// In the order of the report.
std::span<const Experiment> all_experiments();
// Throws InvalidArgument naming the known ones.
const Experiment& find_experiment(std::string_view name);
Outcome run_experiment(const Experiment& experiment, ExperimentContext& context);

// One file each: experiments_latency.cc, _memory.cc, _llama.cc and _beyond.cc.
std::vector<Experiment> latency_experiments();
std::vector<Experiment> memory_experiments();
std::vector<Experiment> llama_experiments();
std::vector<Experiment> beyond_experiments();

// A line of a sweep: a strategy over some x.
struct SweepLine {
  std::string name;
  std::string role;
  Strategy strategy = Strategy::kMerge;
};

// Ring Attention, the paper's three collectives, and one fused collective by two ways.
std::vector<SweepLine> usual_lines();

// The times of some strategies at every x.
class Sweep {
 public:
  Sweep(ExperimentContext& context, std::vector<double> x, std::vector<SweepLine> lines,
        const std::function<DecodePoint(double)>& point_at);

  const std::vector<double>& x() const { return x_; }
  const DecodeTime& at(std::size_t line, std::size_t i) const { return times_[line][i]; }
  const DecodeTime& at(Strategy strategy, std::size_t i) const;
  // One value of every time: &DecodeTime::us, say.
  std::vector<double> values(Strategy strategy, double DecodeTime::*value) const;

  // A line for every strategy; where a part of it is simulated and a part is not, two. scale: from microseconds.
  Figure figure(std::string id, std::string title, Axis x, Axis y, double DecodeTime::*value, double scale) const;
  // A row for every x: all times in microseconds, then ring over the last line.
  DataTable table(std::string title, const std::string& x_name, double DecodeTime::*value = &DecodeTime::us) const;

 private:
  std::size_t line_of(Strategy strategy) const;

  std::vector<double> x_;
  std::vector<SweepLine> lines_;
  std::vector<std::vector<DecodeTime>> times_;  // [lines][x]
};

// 80k, 160k, ..., 5.12M: the paper's lengths.
std::vector<double> paper_lengths(bool quick);
std::vector<double> powers_of_two(int from, int to);

}  // namespace treeattn::tools
