// SPDX-License-Identifier: Apache-2.0
// What an experiment gives: figures, tables, and our numbers beside the paper's. `reproduce` writes it as JSON,
// `report` reads it back and draws it.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace treeattn::tools {

// Where a number comes from. Every figure says it.
enum class Source { kMeasured, kSimulated, kClosedForm, kPaper };

// "measured", "simulated", "closed form", "paper".
std::string_view source_name(Source source);

struct Series {
  std::string name;
  std::string role;  // what decides its colour: "ring", "tree", "fused", ...
  Source source = Source::kSimulated;
  std::vector<double> x, y;
};

struct Axis {
  std::string label;
  bool log = false;
};

struct Figure {
  std::string id;  // letters, digits and '-'
  std::string title;
  Axis x, y;
  std::vector<Series> series;
};

struct DataTable {
  std::string title;
  std::vector<std::string> columns;
  std::vector<std::vector<std::string>> rows;
};

// The paper's figure, ours, and why they differ.
struct Comparison {
  std::string what;
  double paper = 0;
  double ours = 0;
  std::string unit;
  Source source = Source::kSimulated;
  std::string why;
};

// Something our numbers must show.
struct Target {
  std::string what;
  double value = 0;
  std::string wanted;  // "at least 2.5"
  bool holds = false;
};

struct Outcome {
  std::string name;
  std::string title;
  std::string paper;    // what the paper says
  std::string command;  // that makes it
  std::vector<Figure> figures;
  std::vector<DataTable> tables;
  std::vector<Comparison> comparisons;
  std::vector<Target> targets;
  std::vector<std::string> notes;
};

nlohmann::ordered_json to_json(const Outcome& outcome);
// Throws BadFile, naming `file`, for anything else.
Outcome outcome_of(const nlohmann::ordered_json& json, const std::string& file);

}  // namespace treeattn::tools
