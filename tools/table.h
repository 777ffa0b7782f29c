// SPDX-License-Identifier: Apache-2.0
// Tables whose columns line up, and numbers for people.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace treeattn::tools {

enum class Align { kLeft, kRight };

struct Column {
  std::string title;
  Align align = Align::kRight;
  std::size_t width = 0;  // at least this; needed only for rows that are printed as they come
};

// Either print_header() and then print_row() as each row is ready, or add() all the rows and print(), which widens the
// columns to what is in them. Everything goes to stdout.
class Table {
 public:
  explicit Table(std::vector<Column> columns);

  void print_header() const;
  void print_row(const std::vector<std::string>& cells) const;

  void add(std::vector<std::string> cells);
  void print();

 private:
  std::string line(const std::vector<std::string>& cells) const;

  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

// 1536 -> "1.5 KiB".
std::string format_bytes(std::size_t bytes);
// Enough decimals for three or four digits: 0.0123, 1.234, 12.34, 1234.
std::string format_number(double value);
// "1 rank", "2 ranks".
std::string format_count(std::int64_t count, std::string_view what);

}  // namespace treeattn::tools
