// SPDX-License-Identifier: Apache-2.0
// Charts of odd data: tags close in the order they open, text is escaped, and what is said to be drawn is there.
#include "svg_chart.h"

#include <gtest/gtest.h>

#include <cctype>
#include <limits>
#include <regex>
#include <string>
#include <vector>

namespace treeattn::tools {
namespace {

// Why a text is not a well-formed element; empty if it is. Knows what the writers here use: elements, attributes in
// double quotes, the five entities.
std::string malformed(const std::string& xml) {
  std::vector<std::string> open;
  for (std::size_t i = 0; i < xml.size();) {
    if (xml[i] == '&') {
      const std::size_t end = xml.find(';', i);
      const std::string entity = xml.substr(i, end == std::string::npos ? 10 : end - i + 1);
      if (!std::regex_match(entity, std::regex("&(amp|lt|gt|quot|apos);"))) return "entity " + entity;
      i = end + 1;
      continue;
    }
    if (xml[i] != '<') {
      if (static_cast<unsigned char>(xml[i]) < 0x20 && !std::isspace(xml[i])) return "control character";
      if (open.empty() && !std::isspace(static_cast<unsigned char>(xml[i]))) return "text outside the root";
      ++i;
      continue;
    }
    const std::size_t end = xml.find('>', i);
    if (end == std::string::npos) return "a tag without end";
    const std::string tag = xml.substr(i, end - i + 1);
    std::smatch match;
    static const std::regex kClose("</([a-z]+)>");
    static const std::regex kOpen("<([a-z]+)((?:\\s+[a-zA-Z-]+=\"[^\"<]*\")*)\\s*(/?)>");
    if (std::regex_match(tag, match, kClose)) {
      if (open.empty() || open.back() != match[1]) return "closes " + match[1].str();
      open.pop_back();
    } else if (std::regex_match(tag, match, kOpen)) {
      if (match[3].length() == 0) open.push_back(match[1]);
    } else {
      return "tag " + tag;
    }
    i = end + 1;
  }
  return open.empty() ? "" : "never closes " + open.back();
}

std::size_t count(const std::string& text, const std::string& what) {
  std::size_t n = 0;
  for (std::size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++n;
  return n;
}

Figure figure(bool log_x, bool log_y, std::vector<double> x, std::vector<double> y) {
  Figure out{"some-id", "A <title> & \"more\"", {"x", log_x}, {"y", log_y}, {}};
  for (const Source source : {Source::kMeasured, Source::kSimulated, Source::kClosedForm, Source::kPaper}) {
    out.series.push_back({"a < b & c", "ring", source, x, y});
  }
  return out;
}

TEST(SvgChartTest, OddDataGivesWellFormedXml) {
  const double inf = std::numeric_limits<double>::infinity();
  const std::vector<std::vector<double>> lists = {{},
                                                  {1},
                                                  {0, 0},
                                                  {-3, 5, 2},
                                                  {1e-300, 1e300},
                                                  {inf, 1, std::nan("")},
                                                  {5, 5, 5, 5},
                                                  {1e9, 1e9 + 1},
                                                  {80000, 5.12e6},
                                                  {1, 2, 4, 8},
                                                  {0.001, 0.002}};
  for (const auto& x : lists) {
    for (const bool log_x : {false, true}) {
      for (const bool log_y : {false, true}) {
        const std::string svg = draw_chart(figure(log_x, log_y, x, {x.rbegin(), x.rend()}));
        EXPECT_EQ(malformed(svg), "") << svg;
        EXPECT_EQ(malformed(standalone_svg(svg)), "");
        EXPECT_EQ(svg.find("nan"), std::string::npos);
        EXPECT_EQ(svg.find("inf"), std::string::npos);
      }
    }
  }
}

TEST(SvgChartTest, ALongTitleStaysInside) {
  Figure some = figure(false, false, {1, 2}, {3, 4});
  EXPECT_EQ(count(draw_chart(some), "textLength"), 0u);
  some.title = std::string(100, 'w');
  EXPECT_EQ(count(draw_chart(some), "textLength"), 1u);
}

TEST(SvgChartTest, SaysWhatIsDrawn) {
  const std::string all = draw_chart(figure(true, true, {1, 10, 100}, {3, 2, 1}));
  EXPECT_NE(all.find("data-figure=\"some-id\""), std::string::npos);
  EXPECT_NE(all.find("data-series=\"4\" data-points=\"12\""), std::string::npos);
  EXPECT_EQ(count(all, "class=\"ta-mark "), 12u);
  EXPECT_EQ(count(all, "class=\"ta-line "), 4u);
  // A logarithm has no place for 0: one point less in each line.
  const std::string fewer = draw_chart(figure(true, true, {1, 10, 100}, {3, 0, 1}));
  EXPECT_NE(fewer.find("data-points=\"8\""), std::string::npos);
  EXPECT_EQ(count(fewer, "class=\"ta-mark "), 8u);
}

TEST(SvgChartTest, LargerValuesAreHigherUp) {
  for (const bool log : {false, true}) {
    const std::string svg = draw_chart(figure(log, log, {1, 2}, {1, 50}));
    std::smatch match;
    const std::regex line("class=\"ta-line [^\"]*\" d=\"M([0-9.]+) ([0-9.]+)L([0-9.]+) ([0-9.]+)\"");
    ASSERT_TRUE(std::regex_search(svg, match, line)) << svg;
    EXPECT_LT(std::stod(match[1]), std::stod(match[3]));
    EXPECT_GT(std::stod(match[2]), std::stod(match[4]));
  }
}

TEST(SvgChartTest, ShortNumbers) {
  EXPECT_EQ(short_number(5120000), "5.12M");
  EXPECT_EQ(short_number(80000), "80k");
  EXPECT_EQ(short_number(4096), "4096");
  EXPECT_EQ(short_number(0.001), "0.001");
  EXPECT_EQ(short_number(0), "0");
}

}  // namespace
}  // namespace treeattn::tools
