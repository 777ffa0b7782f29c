// SPDX-License-Identifier: Apache-2.0
// Two spaces between columns; flushed row by row, so that a long run can be watched through a pipe.
#include "table.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

namespace treeattn::tools {

Table::Table(std::vector<Column> columns) : columns_(std::move(columns)) {
  for (Column& column : columns_) column.width = std::max(column.width, column.title.size());
}

std::string Table::line(const std::vector<std::string>& cells) const {
  std::string out;
  for (std::size_t i = 0; i < columns_.size() && i < cells.size(); ++i) {
    if (i > 0) out += "  ";
    const char* format = columns_[i].align == Align::kLeft ? "{:<{}}" : "{:>{}}";
    out += fmt::format(fmt::runtime(format), cells[i], columns_[i].width);
  }
  out.erase(out.find_last_not_of(' ') + 1);
  return out;
}

void Table::print_header() const {
  std::vector<std::string> titles;
  for (const Column& column : columns_) titles.push_back(column.title);
  print_row(titles);
}

void Table::print_row(const std::vector<std::string>& cells) const {
  fmt::print("{}\n", line(cells));
  std::fflush(stdout);
}

void Table::add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }

void Table::print() {
  for (const auto& row : rows_) {
    for (std::size_t i = 0; i < columns_.size() && i < row.size(); ++i) {
      columns_[i].width = std::max(columns_[i].width, row[i].size());
    }
  }
  print_header();
  for (const auto& row : rows_) print_row(row);
}

std::string format_bytes(std::size_t bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
  const bool whole = value == std::floor(value);
  return fmt::format("{:.{}f} {}", value, whole ? 0 : value < 10 ? 2 : 1, kUnits[unit]);
}

std::string format_number(double value) {
  const double size = std::fabs(value);
  return fmt::format("{:.{}f}", value, size >= 1000 ? 0 : size >= 100 ? 1 : size >= 10 ? 2 : size >= 1 ? 3 : 4);
}

std::string format_count(std::int64_t count, std::string_view what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

}  // namespace treeattn::tools
