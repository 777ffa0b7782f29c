// SPDX-License-Identifier: Apache-2.0
#include "outcome.h"

#include <array>

#include "base/check.h"

namespace treeattn::tools {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kIdCharacters = "abcdefghijklmnopqrstuvwxyz0123456789-";
constexpr std::array kSources = {Source::kMeasured, Source::kSimulated, Source::kClosedForm, Source::kPaper};

Source parse_source(const Json& name) {
  for (const Source source : kSources) {
    if (name == source_name(source)) return source;
  }
  base::throw_invalid("source is {}; accepted: measured, simulated, closed form, paper", name.dump());
}

Json axis_json(const Axis& axis) { return {{"label", axis.label}, {"log", axis.log}}; }
Axis axis_of(const Json& json) { return {json.at("label"), json.at("log")}; }

Json figure_json(const Figure& figure) {
  Json out = {{"id", figure.id}, {"title", figure.title}, {"x", axis_json(figure.x)}, {"y", axis_json(figure.y)}};
  out["series"] = Json::array();
  for (const Series& s : figure.series) {
    out["series"].push_back(
        {{"name", s.name}, {"role", s.role}, {"source", source_name(s.source)}, {"x", s.x}, {"y", s.y}});
  }
  return out;
}

Figure figure_of(const Json& json) {
  Figure figure{json.at("id"), json.at("title"), axis_of(json.at("x")), axis_of(json.at("y")), {}};
  // It becomes the name of a file.
  base::require(!figure.id.empty() && figure.id.find_first_not_of(kIdCharacters) == std::string::npos,
                "id of a figure is \"{}\"; accepted: small letters, digits and \"-\"", figure.id);
  for (const Json& s : json.at("series")) {
    figure.series.push_back({s.at("name"), s.at("role"), parse_source(s.at("source")), s.at("x"), s.at("y")});
    const Series& series = figure.series.back();
    base::require(series.x.size() == series.y.size(), "series \"{}\" has {} x and {} y; accepted: as many of each",
                  series.name, series.x.size(), series.y.size());
  }
  return figure;
}

Outcome parse(const Json& json) {
  Outcome out{json.at("name"), json.at("title"), json.at("paper"), json.at("command"), {}, {}, {}, {}, {}};
  for (const Json& figure : json.at("figures")) out.figures.push_back(figure_of(figure));
  for (const Json& t : json.at("tables")) out.tables.push_back({t.at("title"), t.at("columns"), t.at("rows")});
  for (const Json& c : json.at("comparisons")) {
    out.comparisons.push_back(
        {c.at("what"), c.at("paper"), c.at("ours"), c.at("unit"), parse_source(c.at("source")), c.at("why")});
  }
  for (const Json& t : json.at("targets")) {
    out.targets.push_back({t.at("what"), t.at("value"), t.at("wanted"), t.at("holds")});
  }
  json.at("notes").get_to(out.notes);
  return out;
}

}  // namespace

std::string_view source_name(Source source) {
  switch (source) {
    case Source::kMeasured:
      return "measured";
    case Source::kSimulated:
      return "simulated";
    case Source::kClosedForm:
      return "closed form";
    case Source::kPaper:
      return "paper";
  }
  base::throw_invalid("source = {}; accepted: 0 to 3", static_cast<int>(source));
}

Json to_json(const Outcome& outcome) {
  Json out = {{"name", outcome.name}, {"title", outcome.title}, {"paper", outcome.paper}, {"command", outcome.command}};
  for (const char* list : {"figures", "tables", "comparisons", "targets"}) out[list] = Json::array();
  for (const Figure& figure : outcome.figures) out["figures"].push_back(figure_json(figure));
  for (const DataTable& table : outcome.tables) {
    out["tables"].push_back({{"title", table.title}, {"columns", table.columns}, {"rows", table.rows}});
  }
  for (const Comparison& c : outcome.comparisons) {
    out["comparisons"].push_back({{"what", c.what},
                                  {"paper", c.paper},
                                  {"ours", c.ours},
                                  {"ratio", c.ours / c.paper},
                                  {"unit", c.unit},
                                  {"source", source_name(c.source)},
                                  {"why", c.why}});
  }
  for (const Target& t : outcome.targets) {
    out["targets"].push_back({{"what", t.what}, {"value", t.value}, {"wanted", t.wanted}, {"holds", t.holds}});
  }
  out["notes"] = outcome.notes;
  return out;
}

Outcome outcome_of(const Json& json, const std::string& file) {
  try {
    return parse(json);
  } catch (const nlohmann::json::exception&) {
    throw BadFile(
        fmt::format("{}: a value is missing or of another type; accepted: what `treeattn reproduce` writes", file));
  } catch (const InvalidArgument& error) {
    throw BadFile(fmt::format("{}: {}", file, error.what()));
  }
}

}  // namespace treeattn::tools
