// SPDX-License-Identifier: Apache-2.0
#include "report_page.h"

#include <fmt/format.h>

#include <string_view>

#include "svg_chart.h"
#include "tree_drawing.h"
#include "treeattn/version.h"

namespace treeattn::tools {
namespace {

constexpr std::string_view kPageStyle = R"(:root { color-scheme: light dark; --back: #ffffff; --ink: #1b1f24;
  --muted: #57606a; --rule: #d8dee4; --good: #047857; --bad: #b91c1c; --code: #f3f5f7; }
@media (prefers-color-scheme: dark) { :root { --back: #0d1117; --ink: #e6edf3; --muted: #9da7b1; --rule: #30363d;
  --good: #4ade80; --bad: #f87171; --code: #161b22; } }
@media print { :root { --back: #ffffff; --ink: #000000; --muted: #444444; --rule: #cccccc; --code: #f3f5f7;
  --good: #047857; --bad: #b91c1c; } }
body { background: var(--back); color: var(--ink); font: 16px/1.5 system-ui, "DejaVu Sans", sans-serif; margin: 0 auto;
  max-width: 84rem; padding: 1.5rem; }
h1 { line-height: 1.2; } h2 { border-top: 1px solid var(--rule); margin-top: 3rem; padding-top: 1rem; }
.says { color: var(--muted); max-width: 60rem; }
.figures { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); }
figure { margin: 0; } figure svg { height: auto; max-width: 100%; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; margin: 0.75rem 0; }
caption { font-weight: 600; text-align: left; }
th, td { border-bottom: 1px solid var(--rule); padding: 0.25rem 0.75rem 0.25rem 0; text-align: right; }
th:first-child, td:first-child, .words th, .words td { text-align: left; }
.words td { vertical-align: top; }
code { background: var(--code); border-radius: 4px; padding: 0.1rem 0.3rem; }
.good { color: var(--good); } .bad { color: var(--bad); font-weight: 600; }
@media print { body { max-width: none; padding: 0; } h2 { break-before: page; } figure, table { break-inside: avoid; } }
)";

std::string cell(const char* tag, std::string_view text) {
  return fmt::format("<{0}>{1}</{0}>", tag, escape_xml(text));
}

std::string html_table(const DataTable& table) {
  std::string out =
      fmt::format("<div class=\"scroll\"><table><caption>{}</caption><thead><tr>", escape_xml(table.title));
  for (const std::string& column : table.columns) out += cell("th", column);
  out += "</tr></thead><tbody>\n";
  for (const auto& row : table.rows) {
    out += "<tr>";
    for (const std::string& text : row) out += cell("td", text);
    out += "</tr>\n";
  }
  return out + "</tbody></table></div>\n";
}

std::string comparisons(std::span<const Comparison> list) {
  if (list.empty()) return "";
  std::string out =
      "<div class=\"scroll\"><table class=\"words\"><caption>The paper and ours</caption><thead><tr><th>what</th>"
      "<th>paper</th><th>ours</th><th>ours / paper</th><th>unit</th><th>source</th><th>why</th></tr></thead><tbody>\n";
  for (const Comparison& c : list) {
    out += "<tr>" + cell("td", c.what) + cell("td", short_number(c.paper)) + cell("td", short_number(c.ours)) +
           cell("td", short_number(c.ours / c.paper)) + cell("td", c.unit) + cell("td", source_name(c.source)) +
           cell("td", c.why) + "</tr>\n";
  }
  return out + "</tbody></table></div>\n";
}

std::string targets(std::span<const Target> list) {
  if (list.empty()) return "";
  std::string out =
      "<div class=\"scroll\"><table class=\"words\"><caption>What must hold</caption><thead><tr><th>what</th>"
      "<th>value</th><th>wanted</th><th></th></tr></thead><tbody>\n";
  for (const Target& t : list) {
    out +=
        fmt::format("<tr>{}{}{}<td class=\"{}\">{}</td></tr>\n", cell("td", t.what), cell("td", short_number(t.value)),
                    cell("td", t.wanted), t.holds ? "good" : "bad", t.holds ? "holds" : "missed");
  }
  return out + "</tbody></table></div>\n";
}

std::string figures(std::span<const Drawing> drawings) {
  if (drawings.empty()) return "";
  std::string out = "<div class=\"figures\">\n";
  for (const auto& [id, svg] : drawings) out += fmt::format("<figure>{}</figure>\n", svg);
  return out + "</div>\n";
}

std::string section(const Outcome& outcome) {
  std::string out = fmt::format("<section id=\"{}\">\n{}\n<p class=\"says\">{}</p>\n<p><code>{}</code></p>\n",
                                escape_xml(outcome.name), cell("h2", outcome.title), escape_xml(outcome.paper),
                                escape_xml(outcome.command));
  out += figures(figure_drawings(outcome));
  out += comparisons(outcome.comparisons);
  out += targets(outcome.targets);
  for (const std::string& note : outcome.notes) out += cell("p", note) + "\n";
  if (!outcome.tables.empty()) {
    out += "<details open=\"open\"><summary>Data</summary>\n";
    for (const DataTable& table : outcome.tables) out += html_table(table);
    out += "</details>\n";
  }
  return out + "</section>\n";
}

std::string contents(std::span<const Outcome> outcomes) {
  std::string out = "<nav><ul>\n<li><a href=\"#topology\">Who sends to whom</a></li>\n";
  for (const Outcome& outcome : outcomes) {
    out += fmt::format("<li><a href=\"#{}\">{}</a></li>\n", escape_xml(outcome.name), escape_xml(outcome.title));
  }
  return out + "</ul></nav>\n";
}

constexpr std::string_view kIntroduction =
    R"(<p>Every number says where it comes from. <strong>Measured</strong> (filled circles): counted or timed on the
machine that made this page. <strong>Simulated</strong> (open circles): the library's own messages on a simulated
cluster. <strong>Closed form</strong> (dashed, squares): the cost model. <strong>Paper</strong> (diamonds): printed in
the paper.</p>
)";

}  // namespace

std::vector<Drawing> topology_drawings() {
  std::vector<int> nodes;
  for (int rank = 0; rank < 16; ++rank) nodes.push_back(rank / 8);
  return {{"reduction-tree", draw_tree("reduction-tree", "Tree: states go up, 4 steps", Strategy::kTwoLevel, nodes)},
          {"ring", draw_ring("ring", "Ring: K and V go round", nodes)}};
}

std::vector<Drawing> figure_drawings(const Outcome& outcome) {
  std::vector<Drawing> out;
  for (const Figure& figure : outcome.figures) out.emplace_back(figure.id, draw_chart(figure));
  return out;
}

std::string report_page(std::span<const Outcome> outcomes) {
  std::string body = "<h1>Tree Attention: the paper's results beside ours</h1>\n";
  body += kIntroduction;
  body += contents(outcomes);
  body += fmt::format(
      "<section id=\"topology\">\n<h2>Who sends to whom</h2>\n<p class=\"says\">16 ranks on two nodes of 8, drawn from "
      "the schedules that are executed. The result comes back down the tree the same way.</p>\n{}</section>\n",
      figures(topology_drawings()));
  for (const Outcome& outcome : outcomes) body += section(outcome);
  body += "<section id=\"commands\">\n<h2>The commands that made this</h2>\n<ul>\n";
  for (const Outcome& outcome : outcomes)
    body += fmt::format("<li><code>{}</code></li>\n", escape_xml(outcome.command));
  body += fmt::format("</ul>\n<p class=\"says\">treeattn {}</p>\n</section>\n", kVersion);
  return fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n<meta name=\"viewport\" "
      "content=\"width=device-width, initial-scale=1\"/>\n<title>Tree Attention: the paper's results beside "
      "ours</title>\n<style>\n{}{}</style>\n</head>\n<body>\n{}</body>\n</html>\n",
      kPageStyle, chart_style(), body);
}

}  // namespace treeattn::tools
