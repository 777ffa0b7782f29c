// SPDX-License-Identifier: Apache-2.0
#include "svg_chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "base/check.h"
#include "base/round_up.h"

namespace treeattn::tools {
namespace {

constexpr double kPlotHeight = 300;
constexpr double kLeft = 72, kRight = 16, kTop = 36, kAxisHeight = 48, kLegendLine = 18, kLegendColumn = 276;
constexpr double kPlotWidth = kDrawingWidth - kLeft - kRight;
constexpr std::size_t kLegendColumns = 2;
constexpr std::size_t kMostTicks = 13;

constexpr std::string_view kStyle = R"(.ta-figure {
  --ta-back: #ffffff; --ta-ink: #1b1f24; --ta-muted: #57606a; --ta-grid: #d8dee4;
  --ta-ring: #c2410c; --ta-tree: #1d4ed8; --ta-fused: #047857; --ta-butterfly: #0e7490; --ta-gather: #a16207;
  --ta-two_level: #7c3aed; --ta-formula: #57606a; --ta-paper: #be185d; --ta-other: #57606a;
  font-family: system-ui, "DejaVu Sans", sans-serif; font-size: 12px; background: var(--ta-back); }
@media (prefers-color-scheme: dark) { .ta-figure {
  --ta-back: #0d1117; --ta-ink: #e6edf3; --ta-muted: #9da7b1; --ta-grid: #30363d;
  --ta-ring: #fb923c; --ta-tree: #79a6ff; --ta-fused: #4ade80; --ta-butterfly: #38d6ee; --ta-gather: #facc15;
  --ta-two_level: #c4a1ff; --ta-formula: #9da7b1; --ta-paper: #f9a8d4; --ta-other: #9da7b1; } }
@media print { .ta-figure {
  --ta-back: #ffffff; --ta-ink: #000000; --ta-muted: #444444; --ta-grid: #cccccc;
  --ta-ring: #c2410c; --ta-tree: #1d4ed8; --ta-fused: #047857; --ta-butterfly: #0e7490; --ta-gather: #a16207;
  --ta-two_level: #7c3aed; --ta-formula: #444444; --ta-paper: #be185d; --ta-other: #444444; } }
.ta-figure text { fill: var(--ta-ink); }
.ta-figure .ta-title { font-size: 14px; font-weight: 600; }
.ta-figure .ta-tick, .ta-figure .ta-label { fill: var(--ta-muted); }
.ta-figure .ta-grid { stroke: var(--ta-grid); stroke-width: 1; fill: none; }
.ta-figure .ta-line { stroke: var(--ta-colour); stroke-width: 2; fill: none; stroke-linejoin: round; }
.ta-figure .ta-mark { stroke: var(--ta-colour); stroke-width: 1.6; fill: var(--ta-back); }
.ta-figure .ta-measured.ta-mark, .ta-figure .ta-paper.ta-mark { fill: var(--ta-colour); }
.ta-figure .ta-closed_form.ta-line { stroke-dasharray: 6 4; }
.ta-figure .ta-paper.ta-line { stroke-dasharray: 2 3; }
)";

// As a class and a colour. Unknown roles share one colour.
std::string role_class(const std::string& role) {
  static const std::set<std::string> kKnown = {"ring",   "tree",      "fused",   "butterfly",
                                               "gather", "two_level", "formula", "paper"};
  return kKnown.contains(role) ? role : "other";
}

std::string source_class(Source source) {
  std::string name(source_name(source));
  std::replace(name.begin(), name.end(), ' ', '_');
  return "ta-" + name;
}

// From values to places on the drawing.
class Scale {
 public:
  Scale(const Axis& axis, const std::vector<double>& values, double from, double to)
      : log_(axis.log), from_(from), to_(to) {
    std::vector<double> shown;
    for (const double value : values) {
      if (shows(value)) shown.push_back(place(value));
    }
    if (shown.empty()) shown = {log_ ? 0.0 : 1.0};
    low_ = *std::min_element(shown.begin(), shown.end());
    high_ = *std::max_element(shown.begin(), shown.end());
    if (!log_) low_ = std::min(low_, 0.0);
    if (high_ - low_ < 1e-12 * std::max(1.0, std::fabs(high_))) {
      low_ -= log_ ? 0.5 : 0;
      high_ += log_ ? 0.5 : 1;
    }
    const double margin = 0.05 * (high_ - low_);
    high_ += margin;
    if (log_) low_ -= margin;
  }

  bool shows(double value) const { return std::isfinite(value) && (!log_ || value > 0); }
  double at(double value) const { return from_ + (place(value) - low_) / (high_ - low_) * (to_ - from_); }

  // wanted: values that would make good ticks, such as those of a sweep.
  std::vector<double> ticks(const std::set<double>& wanted) const {
    if (log_ && !wanted.empty() && wanted.size() <= kMostTicks) return {wanted.begin(), wanted.end()};
    return log_ ? log_ticks() : linear_ticks();
  }

 private:
  double place(double value) const { return log_ ? std::log10(value) : value; }

  std::vector<double> log_ticks() const {
    std::vector<double> out;
    const bool few = high_ - low_ < 2.5;
    const double every = std::max(1.0, std::ceil((high_ - low_) / static_cast<double>(kMostTicks)));
    for (double decade = std::floor(low_); decade <= high_; decade += every) {
      for (const double digit : {1.0, 2.0, 5.0}) {
        const double value = digit * std::pow(10.0, decade);
        if ((few || digit == 1.0) && place(value) >= low_ && place(value) <= high_) out.push_back(value);
      }
    }
    return out;
  }

  std::vector<double> linear_ticks() const {
    const double rough = (high_ - low_) / 6;
    const double power = std::pow(10.0, std::floor(std::log10(rough)));
    const double digit = rough / power;
    const double step = power * (digit <= 1 ? 1 : digit <= 2 ? 2 : digit <= 5 ? 5 : 10);
    std::vector<double> out;
    for (double k = std::ceil(low_ / step); k * step <= high_; ++k) out.push_back(k * step);
    return out;
  }

  bool log_;
  double from_, to_;
  double low_ = 0, high_ = 1;
};

std::string mark(Source source, double x, double y) {
  const std::string kind = source_class(source);
  switch (source) {
    case Source::kClosedForm:
      return fmt::format(R"(<rect class="ta-mark {}" x="{:.1f}" y="{:.1f}" width="5" height="5"/>)", kind, x - 2.5,
                         y - 2.5);
    case Source::kPaper:
      return fmt::format(R"(<path class="ta-mark {}" d="M{:.1f} {:.1f}l5 5l-5 5l-5 -5z"/>)", kind, x, y - 5);
    default:
      return fmt::format(R"(<circle class="ta-mark {}" cx="{:.1f}" cy="{:.1f}" r="3.5"/>)", kind, x, y);
  }
}

// For a title that would run over the edge: it is drawn as wide as the plot.
std::string squeeze(std::string_view title) {
  constexpr double kCharacter = 8.5;  // of the widest fonts in use, about
  const auto characters = std::count_if(title.begin(), title.end(), [](char c) { return (c & 0xC0) != 0x80; });
  if (static_cast<double>(characters) * kCharacter <= kPlotWidth) return {};
  return fmt::format(" textLength=\"{}\" lengthAdjust=\"spacingAndGlyphs\"", kPlotWidth);
}

class Chart {
 public:
  explicit Chart(const Figure& figure)
      : figure_(figure),
        x_(figure.x, all(&Series::x), kLeft, kLeft + kPlotWidth),
        y_(figure.y, all(&Series::y), kTop + kPlotHeight, kTop) {}

  std::string draw() {
    std::string body;
    draw_axes(body);
    for (std::size_t i = 0; i < figure_.series.size(); ++i) draw_series(body, i);
    draw_legend(body);
    const std::size_t lines = base::divide_up(figure_.series.size(), kLegendColumns);
    const double height = kTop + kPlotHeight + kAxisHeight + kLegendLine * static_cast<double>(lines) + 8;
    return svg_drawing(figure_.id, figure_.title, height, figure_.series.size(), points_, body);
  }

 private:
  std::vector<double> all(std::vector<double> Series::*values) const {
    std::vector<double> out;
    for (const Series& series : figure_.series) out.insert(out.end(), (series.*values).begin(), (series.*values).end());
    return out;
  }

  void draw_axes(std::string& body) const {
    const double bottom = kTop + kPlotHeight, right = kLeft + kPlotWidth;
    body += fmt::format("<text class=\"ta-title\" x=\"{}\" y=\"20\"{}>{}</text>\n", kLeft, squeeze(figure_.title),
                        escape_xml(figure_.title));
    std::set<double> swept;
    for (const double value : all(&Series::x)) {
      if (x_.shows(value)) swept.insert(value);
    }
    for (const double tick : x_.ticks(swept)) {
      const double x = x_.at(tick);
      body += fmt::format("<path class=\"ta-grid\" d=\"M{0:.1f} {1}V{2}\"/>", x, kTop, bottom);
      body += fmt::format("<text class=\"ta-tick\" x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n", x,
                          bottom + 16, short_number(tick));
    }
    for (const double tick : y_.ticks({})) {
      const double y = y_.at(tick);
      body += fmt::format("<path class=\"ta-grid\" d=\"M{} {:.1f}H{}\"/>", kLeft, y, right);
      body += fmt::format("<text class=\"ta-tick\" x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>\n", kLeft - 6,
                          y + 4, short_number(tick));
    }
    body += fmt::format("<text class=\"ta-label\" x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n",
                        kLeft + kPlotWidth / 2, bottom + 36, escape_xml(figure_.x.label));
    body += fmt::format(
        "<text class=\"ta-label\" transform=\"translate(14 {}) rotate(-90)\" text-anchor=\"middle\">{}</text>\n",
        kTop + kPlotHeight / 2, escape_xml(figure_.y.label));
  }

  // Lines of one role and one source have the same colour, dashes and marks. The later, the stronger.
  double opacity(std::size_t line) const {
    const auto looks_alike = [&](const Series& other) {
      return role_class(other.role) == role_class(figure_.series[line].role) &&
             other.source == figure_.series[line].source;
    };
    const auto first = figure_.series.begin(), here = first + static_cast<std::ptrdiff_t>(line);
    const auto before = std::count_if(first, here, looks_alike);
    const auto after = std::count_if(here + 1, figure_.series.end(), looks_alike);
    if (before + after == 0) return 1;
    constexpr double kFaintest = 0.4;
    return kFaintest + (1 - kFaintest) * static_cast<double>(before) / static_cast<double>(before + after);
  }

  std::string look(std::size_t line) const {
    std::string out = fmt::format("style=\"--ta-colour: var(--ta-{})\"", role_class(figure_.series[line].role));
    if (const double strength = opacity(line); strength < 1) out += fmt::format(" opacity=\"{:.2g}\"", strength);
    return out;
  }

  void draw_series(std::string& body, std::size_t line) {
    const Series& series = figure_.series[line];
    std::string path, marks;
    for (std::size_t i = 0; i < std::min(series.x.size(), series.y.size()); ++i) {
      if (!x_.shows(series.x[i]) || !y_.shows(series.y[i])) continue;
      const double x = x_.at(series.x[i]), y = y_.at(series.y[i]);
      path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : "L", x, y);
      marks += mark(series.source, x, y);
      ++points_;
    }
    body += fmt::format("<g {} data-name=\"{}\">", look(line), escape_xml(series.name));
    body += fmt::format("<path class=\"ta-line {}\" d=\"{}\"/>{}</g>\n", source_class(series.source), path, marks);
  }

  void draw_legend(std::string& body) const {
    for (std::size_t i = 0; i < figure_.series.size(); ++i) {
      const Series& series = figure_.series[i];
      const double x = kLeft + kLegendColumn * static_cast<double>(i % kLegendColumns);
      const double y = kTop + kPlotHeight + kAxisHeight + kLegendLine * static_cast<double>(i / kLegendColumns) + 8;
      const std::string kind = source_class(series.source);
      body += fmt::format("<g {}><path class=\"ta-key ta-line {}\" d=\"M{} {}h28\"/>", look(i), kind, x, y - 4);
      std::string key = mark(series.source, x + 14, y - 4);
      key.replace(key.find("ta-mark"), 7, "ta-key ta-mark");
      body += fmt::format("{}<text x=\"{}\" y=\"{}\">{}</text></g>\n", key, x + 34, y,
                          escape_xml(fmt::format("{} ({})", series.name, source_name(series.source))));
    }
  }

  const Figure& figure_;
  Scale x_, y_;
  std::size_t points_ = 0;
};

}  // namespace

std::string escape_xml(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        // XML has no place for other control characters.
        if (static_cast<unsigned char>(c) >= 0x20 || c == '\n' || c == '\t') out += c;
    }
  }
  return out;
}

std::string svg_drawing(std::string_view id, std::string_view title, double height, std::size_t lines,
                        std::size_t marks, std::string_view body) {
  return fmt::format(
      R"(<svg xmlns="http://www.w3.org/2000/svg" class="ta-figure" id="figure-{0}" data-figure="{0}" data-series="{1}" data-points="{2}" viewBox="0 0 {3} {4}" width="{3}" height="{4}" role="img" aria-label="{5}"><title>{5}</title>
{6}</svg>
)",
      escape_xml(id), lines, marks, kDrawingWidth, height, escape_xml(title), body);
}

std::string_view chart_style() { return kStyle; }

std::string draw_chart(const Figure& figure) { return Chart(figure).draw(); }

std::string standalone_svg(std::string_view drawing) {
  const std::size_t end = drawing.find('>');
  base::require(drawing.starts_with("<svg ") && end != std::string_view::npos,
                "a drawing begins with \"{}\"; accepted: <svg ...>", drawing.substr(0, 20));
  return fmt::format("{}\n<style>\n{}</style>{}", drawing.substr(0, end + 1), kStyle, drawing.substr(end + 1));
}

std::string short_number(double value) {
  const double size = std::fabs(value);
  static constexpr struct {
    double from;
    const char* unit;
  } kUnits[] = {{1e12, "T"}, {1e9, "G"}, {1e6, "M"}, {1e4, "k"}};
  for (const auto& unit : kUnits) {
    const double scale = unit.from == 1e4 ? 1e3 : unit.from;
    if (size >= unit.from) return fmt::format("{:.4g}{}", value / scale, unit.unit);
  }
  return fmt::format("{:.4g}", value);
}

}  // namespace treeattn::tools
