// SPDX-License-Identifier: Apache-2.0
#include "tree_drawing.h"

#include <fmt/format.h>

#include <cmath>
#include <numbers>
#include <vector>

#include "plan/schedule.h"
#include "svg_chart.h"

namespace treeattn::tools {
namespace {

constexpr double kMargin = 40, kTop = 48, kLevel = 46, kNodeBox = 40;

// The colour says whether a message leaves its node.
std::string message_line(double x1, double y1, double x2, double y2, bool remote) {
  return fmt::format(
      "<path class=\"ta-line ta-simulated\" style=\"--ta-colour: var(--ta-{})\" d=\"M{:.1f} {:.1f}L{:.1f} {:.1f}\"/>\n",
      remote ? "ring" : "tree", x1, y1, x2, y2);
}

std::string rank_mark(double x, double y, int rank) {
  return fmt::format(
      "<circle class=\"ta-mark ta-simulated\" style=\"--ta-colour: var(--ta-ink)\" cx=\"{0:.1f}\" cy=\"{1:.1f}\" "
      "r=\"11\"/><text x=\"{0:.1f}\" y=\"{2:.1f}\" text-anchor=\"middle\">{3}</text>\n",
      x, y, y + 4, rank);
}

std::string key(double y) {
  const auto entry = [&](double x, const char* colour, const char* text) {
    return fmt::format(
        "<path class=\"ta-key ta-line ta-simulated\" style=\"--ta-colour: var(--ta-{})\" d=\"M{} {}h28\"/><text "
        "x=\"{}\" y=\"{}\">{}</text>\n",
        colour, x, y - 4, x + 34, y, text);
  };
  return entry(kMargin, "tree", "inside a node") + entry(kMargin + 200, "ring", "between nodes");
}

std::string titled(const std::string& title, const std::string& body) {
  return fmt::format("<text class=\"ta-title\" x=\"{}\" y=\"20\">{}</text>\n{}", kMargin, escape_xml(title), body);
}

// A box around the ranks of each node, along one line.
std::string node_boxes(const std::vector<int>& order, std::span<const int> node_of_rank, const std::vector<double>& x,
                       double y) {
  std::string out;
  for (std::size_t first = 0; first < order.size();) {
    const int node = node_of_rank[static_cast<std::size_t>(order[first])];
    std::size_t last = first;
    while (last < order.size() && node_of_rank[static_cast<std::size_t>(order[last])] == node) ++last;
    const double left = x[first] - 15, right = x[last - 1] + 15;
    out += fmt::format(
        "<rect class=\"ta-grid\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{}\" rx=\"8\"/><text "
        "class=\"ta-label\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\">node {}</text>\n",
        left, y - 16, right - left, kNodeBox + 8, (left + right) / 2, y + 27, node);
    first = last;
  }
  return out;
}

}  // namespace

std::string draw_tree(const std::string& id, const std::string& title, Strategy strategy,
                      std::span<const int> node_of_rank) {
  const plan::Schedule schedule = plan::make_schedule(strategy, node_of_rank);
  const std::size_t ranks = schedule.order.size();
  std::vector<double> x_of_place(ranks), x_of_rank(ranks);
  for (std::size_t place = 0; place < ranks; ++place) {
    const double step = ranks > 1 ? (kDrawingWidth - 2 * kMargin) / static_cast<double>(ranks - 1) : 0;
    x_of_place[place] = kMargin + step * static_cast<double>(place);
    x_of_rank[static_cast<std::size_t>(schedule.order[place])] = x_of_place[place];
  }
  std::size_t levels = 0;
  for (const auto& round : schedule.rounds) {
    levels += !round.empty() && round.front().payload != plan::Payload::kResult ? 1 : 0;
  }
  const double bottom = kTop + kLevel * static_cast<double>(levels);
  const auto y_of = [&](std::size_t level) { return bottom - kLevel * static_cast<double>(level); };
  // Where a rank's partial result has got to.
  std::vector<std::size_t> level_of(ranks, 0);
  std::string lines, marks;
  std::size_t messages = 0, level = 0;
  for (const auto& round : schedule.rounds) {
    if (round.empty() || round.front().payload == plan::Payload::kResult) continue;
    ++level;
    for (const plan::Message& m : round) {
      const std::size_t from = static_cast<std::size_t>(m.from), to = static_cast<std::size_t>(m.to);
      const bool remote = node_of_rank[from] != node_of_rank[to];
      lines += message_line(x_of_rank[from], y_of(level_of[from]), x_of_rank[to], y_of(level), remote);
      lines += fmt::format("<path class=\"ta-grid\" d=\"M{0:.1f} {1:.1f}V{2:.1f}\"/>", x_of_rank[to],
                           y_of(level_of[to]), y_of(level));
      lines += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"4\" fill=\"var(--ta-ink)\"/>\n", x_of_rank[to],
                           y_of(level));
      level_of[to] = level;
      ++messages;
    }
  }
  for (std::size_t place = 0; place < ranks; ++place) {
    marks += rank_mark(x_of_place[place], bottom, schedule.order[place]);
  }
  const double end = bottom + kNodeBox + 24;
  const std::string body = node_boxes(schedule.order, node_of_rank, x_of_place, bottom) + lines + marks + key(end);
  return svg_drawing(id, title, end + 8, messages, ranks, titled(title, body));
}

std::string draw_ring(const std::string& id, const std::string& title, std::span<const int> node_of_rank) {
  const std::vector<int> ring = plan::ranks_by_node(node_of_rank);
  const double radius = 110, x0 = kDrawingWidth / 2, y0 = kTop + radius + 12;
  struct Point {
    double x, y;
  };
  const auto at = [&](std::size_t place) -> Point {
    const double angle = 2 * std::numbers::pi * static_cast<double>(place) / static_cast<double>(ring.size());
    return {x0 + 2 * radius * std::sin(angle), y0 - radius * std::cos(angle)};
  };
  std::string lines, marks;
  for (std::size_t place = 0; place < ring.size(); ++place) {
    const std::size_t next = (place + 1) % ring.size();
    const bool remote =
        node_of_rank[static_cast<std::size_t>(ring[place])] != node_of_rank[static_cast<std::size_t>(ring[next])];
    const auto [x1, y1] = at(place);
    const auto [x2, y2] = at(next);
    lines += message_line(x1, y1, x2, y2, remote);
    marks += rank_mark(x1, y1, ring[place]);
  }
  const double end = y0 + radius + 40;
  marks += fmt::format("<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">K and V, {} steps</text>\n", x0, y0 + 4,
                       ring.size() - 1);
  return svg_drawing(id, title, end + 8, ring.size(), ring.size(), titled(title, lines + marks + key(end)));
}

}  // namespace treeattn::tools
