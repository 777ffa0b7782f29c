// SPDX-License-Identifier: Apache-2.0
// A progress line for people who wait: on stderr, only on a terminal, only once the work has lasted two seconds.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>

namespace treeattn::tools {

// Not thread-safe: step() from one thread.
class Progress {
 public:
  // total: how many steps there will be.
  Progress(std::string label, std::size_t total);
  // Wipes the line.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Another step begins or has been done; `what` names it.
  void step(const std::string& what);
  // So many steps have been done, and `what` says more.
  void at(std::size_t done, const std::string& what);
  // Wipes the line, so that something else can be printed; the next step() draws it again.
  void clear();

 private:
  std::string label_;
  std::size_t total_;
  std::size_t done_ = 0;
  bool terminal_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point start_;
  std::chrono::steady_clock::time_point last_;
};

}  // namespace treeattn::tools
