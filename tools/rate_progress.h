// SPDX-License-Identifier: Apache-2.0
// A progress line with a rate and the time left: on stderr, only on a terminal, only once the work has lasted two
// seconds.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace treeattn::tools {

// Not thread-safe: update() from one thread.
class RateProgress {
 public:
  RateProgress(std::string label, std::string unit);
  // Wipes the line.
  ~RateProgress();
  RateProgress(const RateProgress&) = delete;
  RateProgress& operator=(const RateProgress&) = delete;

  void update(std::int64_t done, std::int64_t total);
  void clear();

 private:
  using Clock = std::chrono::steady_clock;

  std::string label_, unit_;
  bool terminal_;
  bool drawn_ = false;
  Clock::time_point start_, last_;
};

}  // namespace treeattn::tools
