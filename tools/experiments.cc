// SPDX-License-Identifier: Apache-2.0
#include "experiments.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "svg_chart.h"
#include "table.h"

namespace treeattn::tools {
namespace {

std::vector<Experiment> make_list() {
  std::vector<Experiment> all;
  for (auto part : {latency_experiments(), memory_experiments(), llama_experiments(), beyond_experiments()}) {
    std::move(part.begin(), part.end(), std::back_inserter(all));
  }
  return all;
}

}  // namespace

std::span<const Experiment> all_experiments() {
  static const std::vector<Experiment> kAll = make_list();
  return kAll;
}

const Experiment& find_experiment(std::string_view name) {
  std::vector<std::string_view> known;
  for (const Experiment& experiment : all_experiments()) {
    if (experiment.name == name) return experiment;
    known.push_back(experiment.name);
  }
  base::throw_invalid("experiment = \"{}\"; accepted: {}, or all", name, fmt::join(known, ", "));
}

Outcome run_experiment(const Experiment& experiment, ExperimentContext& context) {
  Outcome outcome;
  outcome.name = experiment.name;
  outcome.title = experiment.title;
  outcome.paper = experiment.paper;
  outcome.command = fmt::format("treeattn reproduce {}{}{}", experiment.name, context.quick ? " --quick" : "",
                                context.times.can_simulate() ? "" : " --closed-form");
  context.times.take_largest_distance();
  experiment.run(context, outcome);
  if (const auto distance = context.times.take_largest_distance()) {
    outcome.notes.push_back(
        fmt::format("Simulated times on unchanged clusters lie within {:.2f} % of the closed form.", 100 * *distance));
  }
  return outcome;
}

std::vector<SweepLine> usual_lines() {
  return {{"ring", "ring", Strategy::kRing},
          {"tree, three collectives", "tree", Strategy::kPaper},
          {"tree, one (butterfly)", "butterfly", Strategy::kButterfly},
          {"tree, one (merge)", "fused", Strategy::kMerge}};
}

Sweep::Sweep(ExperimentContext& context, std::vector<double> x, std::vector<SweepLine> lines,
             const std::function<DecodePoint(double)>& point_at)
    : x_(std::move(x)), lines_(std::move(lines)), times_(lines_.size()) {
  for (std::size_t line = 0; line < lines_.size(); ++line) {
    for (const double value : x_) {
      DecodePoint point = point_at(value);
      point.strategy = lines_[line].strategy;
      times_[line].push_back(context.times.at(point));
    }
  }
}

std::size_t Sweep::line_of(Strategy strategy) const {
  for (std::size_t line = 0; line < lines_.size(); ++line) {
    if (lines_[line].strategy == strategy) return line;
  }
  base::throw_invalid("strategy {} is not in this sweep", strategy_name(strategy));
}

const DecodeTime& Sweep::at(Strategy strategy, std::size_t i) const { return times_[line_of(strategy)][i]; }

std::vector<double> Sweep::values(Strategy strategy, double DecodeTime::*value) const {
  std::vector<double> out;
  for (const DecodeTime& time : times_[line_of(strategy)]) out.push_back(time.*value);
  return out;
}

Figure Sweep::figure(std::string id, std::string title, Axis x, Axis y, double DecodeTime::*value, double scale) const {
  Figure figure{std::move(id), std::move(title), std::move(x), std::move(y), {}};
  for (std::size_t line = 0; line < lines_.size(); ++line) {
    for (const Source source : {Source::kSimulated, Source::kClosedForm}) {
      Series series{lines_[line].name, lines_[line].role, source, {}, {}};
      for (std::size_t i = 0; i < x_.size(); ++i) {
        if (times_[line][i].source != source) continue;
        series.x.push_back(x_[i]);
        series.y.push_back(scale * times_[line][i].*value);
      }
      if (!series.x.empty()) figure.series.push_back(std::move(series));
    }
  }
  return figure;
}

DataTable Sweep::table(std::string title, const std::string& x_name, double DecodeTime::*value) const {
  DataTable table{std::move(title), {x_name}, {}};
  for (const SweepLine& line : lines_) table.columns.push_back(line.name + ", us");
  table.columns.push_back(fmt::format("{} / {}", lines_.front().name, lines_.back().name));
  table.columns.push_back("source");
  for (std::size_t i = 0; i < x_.size(); ++i) {
    std::vector<std::string> row = {short_number(x_[i])};
    std::vector<std::string> by_formula;
    for (std::size_t line = 0; line < lines_.size(); ++line) {
      row.push_back(format_number(at(line, i).*value));
      if (at(line, i).source == Source::kClosedForm) by_formula.push_back(lines_[line].name);
    }
    row.push_back(format_number(at(0, i).*value / at(lines_.size() - 1, i).*value));
    row.push_back(by_formula.empty() ? "simulated" : fmt::format("closed form: {}", fmt::join(by_formula, ", ")));
    table.rows.push_back(std::move(row));
  }
  return table;
}

std::vector<double> paper_lengths(bool quick) {
  std::vector<double> out;
  for (int k = 0; k <= 6; k += quick ? 3 : 1) out.push_back(80000.0 * (1 << k));
  return out;
}

std::vector<double> powers_of_two(int from, int to) {
  std::vector<double> out;
  for (int value = from; value <= to; value *= 2) out.push_back(value);
  return out;
}

}  // namespace treeattn::tools
