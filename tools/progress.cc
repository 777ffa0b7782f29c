// SPDX-License-Identifier: Apache-2.0
#include "progress.h"

#include <fmt/format.h>

#include <atomic>
#include <chrono>
#include <system_error>
#include <utility>

namespace treeattn::tools {
namespace {

// How many live at the same time, and the innermost of these that is drawn.
std::atomic<int> living = 0, drawn = 0;

}  // namespace

Progress::Progress(std::string label, std::size_t total)
    : depth_(++living), label_(std::move(label)), total_(total), showing_(total == 0) {
  if (!line_.on_terminal()) return;
  try {
    drawer_ = std::thread([this] { draw_until_stopped(); });
  } catch (const std::system_error&) {
  }
}

Progress::~Progress() {
  {
    const std::scoped_lock lock(mutex_);
    stopped_ = true;
  }
  stopping_.notify_one();
  if (drawer_.joinable()) drawer_.join();
  line_.clear();
  int depth = depth_;
  drawn.compare_exchange_strong(depth, depth_ - 1);
  --living;
}

void Progress::at(std::size_t done, const std::string& what) {
  const std::scoped_lock lock(mutex_);
  done_ = done;
  what_ = what;
  showing_ = true;
}

void Progress::clear() {
  const std::scoped_lock lock(mutex_);
  showing_ = false;
  line_.clear();
}

void Progress::draw_until_stopped() try {
  using namespace std::chrono_literals;
  std::unique_lock lock(mutex_);
  while (!stopping_.wait_for(lock, 200ms, [this] { return stopped_; })) {
    if (showing_ && line_.due() && take_line()) line_.draw(text());
  }
} catch (const std::exception&) {
  // No memory for a text: who does the work will say so.
}

// Whether no other that is drawn began later.
bool Progress::take_line() const {
  int last = drawn;
  while (last < depth_ && !drawn.compare_exchange_weak(last, depth_)) {
  }
  return last <= depth_;
}

std::string Progress::text() const {
  const auto seconds = static_cast<long>(base::seconds_since(start_));
  if (total_ == 0) return fmt::format("{}  {} s", label_, seconds);
  return fmt::format("{} {}/{}  {:.60}  {} s", label_, done_, total_, what_, seconds);
}

}  // namespace treeattn::tools
