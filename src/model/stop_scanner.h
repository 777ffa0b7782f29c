// SPDX-License-Identifier: Apache-2.0
// Text that ends before the first of some strings, wherever the pieces it arrives in are cut.
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
    std::size_t end = std::string::npos;
    for (const std::string& stop : stops_) end = std::min(end, held_.find(stop));
    stopped_ = end != std::string::npos;
    return take(stopped_ ? end : held_.size() - longest_beginning());
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
