// SPDX-License-Identifier: Apache-2.0
// Text that ends before the first of some strings, wherever the pieces it arrives in are cut. The first is the one that
// is complete first; of two that end together it is the longer.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace treeattn::model {

class StopScanner {
 public:
  // Requires that no string is empty.
  explicit StopScanner(std::vector<std::string> stops) : stops_(std::move(stops)) {}

  // What can be shown of the text so far and has not been: nothing of a stop string, nor of what may become one.
  std::string next(std::string_view piece) {
    if (stopped_) return {};
    held_ += piece;
    std::pair first(std::string::npos, std::string::npos);  // where it ends, where it begins
    for (const std::string& stop : stops_) {
      const std::size_t begin = held_.find(stop);
      if (begin != std::string::npos) first = std::min(first, std::pair(begin + stop.size(), begin));
    }
    stopped_ = first.second != std::string::npos;
    return take(stopped_ ? first.second : held_.size() - longest_beginning());
  }
  // What was held back: no stop string has come of it.
  std::string finish() { return stopped_ ? std::string() : take(held_.size()); }
  bool stopped() const { return stopped_; }

 private:
  std::string take(std::size_t count) {
    std::string out = held_.substr(0, count);
    held_.erase(0, count);
    return out;
  }
  // The longest end of the text that is the beginning of a stop string.
  std::size_t longest_beginning() const {
    std::size_t longest = 0;
    for (const std::string& stop : stops_) {
      for (std::size_t n = std::min(stop.size() - 1, held_.size()); n > longest; --n) {
        if (std::string_view(held_).ends_with(std::string_view(stop).substr(0, n))) longest = n;
      }
    }
    return longest;
  }

  std::vector<std::string> stops_;
  std::string held_;
  bool stopped_ = false;
};

}  // namespace treeattn::model
