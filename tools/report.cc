// SPDX-License-Identifier: Apache-2.0
// treeattn report: what `treeattn reproduce --out DIR` wrote, as one page of HTML and as SVG files.
#include <fmt/format.h>

#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "base/check.h"
#include "command.h"
#include "experiments.h"
#include "files.h"
#include "option_errors.h"
#include "report_page.h"
#include "svg_chart.h"
#include "table.h"

namespace treeattn::tools {
namespace {

namespace fs = std::filesystem;

struct ReportOptions {
  std::string data, out = "report.html", figures;
};

Outcome read_outcome(const fs::path& file) {
  nlohmann::ordered_json json = nlohmann::ordered_json::parse(read_text(file), nullptr, false);
  if (json.is_discarded())
    throw BadFile(fmt::format("{}: not JSON; accepted: what `treeattn reproduce` writes", file.string()));
  return outcome_of(json, file.string());
}

// In the order of the list of experiments.
std::vector<Outcome> read_data(const fs::path& directory) {
  std::error_code ignored;
  base::require(fs::is_directory(directory, ignored),
                "--data is \"{}\"; accepted: a directory made by treeattn reproduce --out", directory.string());
  std::vector<Outcome> out;
  for (const Experiment& experiment : all_experiments()) {
    const fs::path file = directory / (std::string(experiment.name) + ".json");
    if (fs::exists(file, ignored)) out.push_back(read_outcome(file));
  }
  base::require(!out.empty(),
                "--data is \"{}\", which holds no data; accepted: a directory made by treeattn reproduce --out",
                directory.string());
  return out;
}

int run(const ReportOptions& options) {
  base::require(!options.data.empty(), "--data is missing; accepted: a directory made by treeattn reproduce --out");
  const std::vector<Outcome> outcomes = read_data(options.data);
  if (!options.figures.empty()) inside_option("--figures", [&] { make_directory(options.figures); });
  inside_option("--out", [&] { write_text(options.out, report_page(outcomes)); });
  std::vector<Drawing> drawings = topology_drawings();
  for (const Outcome& outcome : outcomes) {
    for (Drawing& drawing : figure_drawings(outcome)) drawings.push_back(std::move(drawing));
  }
  fmt::print("{}: {}, {}\n", options.out, format_count(std::ssize(outcomes), "experiment"),
             format_count(std::ssize(drawings), "figure"));
  if (options.figures.empty()) return kOk;
  for (const auto& [id, svg] : drawings) write_text(fs::path(options.figures) / (id + ".svg"), standalone_svg(svg));
  fmt::print("{}: {} SVG files\n", options.figures, drawings.size());
  return kOk;
}

constexpr char kFooter[] = R"(Examples:
  treeattn reproduce all --out data
  treeattn report --data data --out report.html
  treeattn report --data data --out report.html --figures figures)";

}  // namespace

Command add_report(CommandLine& parent) {
  CommandLine* app = parent.add_subcommand("report", "One HTML page, and SVG files, of what reproduce wrote");
  auto options = std::make_shared<ReportOptions>();
  app->add_option("--data", options->data, "What treeattn reproduce --out wrote")->type_name("DIR");
  app->add_option("--out", options->out, "The page (default report.html)")->type_name("FILE");
  app->add_option("--figures", options->figures, "Also write every figure as an SVG file into this directory")
      ->type_name("DIR");
  app->footer(kFooter);
  return {app, [options] { return run(*options); }};
}

}  // namespace treeattn::tools
