// SPDX-License-Identifier: Apache-2.0
// A progress line: how many steps of how many, which, and for how long already (terminal_line.h says when it is shown).
#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <string>
#include <thread>

#include "base/timing.h"
#include "terminal_line.h"

namespace treeattn::tools {

// A thread of its own draws it, so that a step that takes long is seen as well; where there can be no more threads
// there is no line. For use by one thread. One may begin and end while another lives, as steps of its step: what is
// drawn then is the inner one.
class Progress {
 public:
  // total: how many steps there will be; 0: there is one thing to wait for, which begins now.
  Progress(std::string label, std::size_t total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Another step begins or has been done; `what` names it.
  void step(const std::string& what) { at(done_ + 1, what); }
  // So many steps have been done, and `what` says more.
  void at(std::size_t done, const std::string& what);
  // Wipes the line, so that something else can be printed; the next step() draws it again.
  void clear();

 private:
  void draw_until_stopped();
  bool take_line() const;
  std::string text() const;

  const int depth_;  // how many live, itself included
  const std::string label_;
  const std::size_t total_;
  std::size_t done_ = 0;
  std::string what_;
  const base::Clock::time_point start_ = base::Clock::now();

  std::mutex mutex_;  // of all that follows, and of what is written above while the thread runs
  std::condition_variable stopping_;
  TerminalLine line_;
  bool showing_ = false;
  bool stopped_ = false;
  std::thread drawer_;  // only where there is a terminal
};

}  // namespace treeattn::tools
