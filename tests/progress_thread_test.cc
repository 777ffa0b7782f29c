// SPDX-License-Identifier: Apache-2.0
// Progress lines on a terminal: what is drawn while one lives within another.
#include "progress.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/timing.h"

namespace treeattn::tools {
namespace {

// Stands where stderr was while it lives.
class Terminal {
 public:
  Terminal() : ours_(::posix_openpt(O_RDWR | O_NOCTTY)), before_(::dup(STDERR_FILENO)) {
    ::setenv("TERM", "xterm", 1);
    EXPECT_EQ(::grantpt(ours_), 0);
    EXPECT_EQ(::unlockpt(ours_), 0);
    const int its = ::open(::ptsname(ours_), O_RDWR | O_NOCTTY);
    EXPECT_GE(::dup2(its, STDERR_FILENO), 0);
    ::close(its);
    EXPECT_EQ(::fcntl(ours_, F_SETFL, O_NONBLOCK), 0);
  }
  ~Terminal() {
    ::dup2(before_, STDERR_FILENO);
    ::close(before_);
    ::close(ours_);
  }
  // The lines that were drawn since it was last asked, without those that are like the one before but for the seconds.
  std::vector<std::string> lines() const {
    std::string all;
    char part[256];
    for (ssize_t got = 0; (got = ::read(ours_, part, sizeof part)) > 0;)
      all.append(part, static_cast<std::size_t>(got));
    std::vector<std::string> out;
    constexpr std::string_view kWipe = "\r\033[K";
    for (std::size_t at = all.find(kWipe); at != std::string::npos;) {
      const std::size_t begin = at + kWipe.size();
      at = all.find(kWipe, begin);
      std::string line = all.substr(begin, at - begin);
      line.resize(line.empty() ? 0 : line.rfind("  "));
      if (out.empty() || out.back() != line) out.push_back(std::move(line));
    }
    return out;
  }

 private:
  int ours_, before_;
};

using Lines = std::vector<std::string>;

// What is drawn until it is this line.
Lines until(const Terminal& terminal, const std::string& last) {
  Lines all;
  for (int i = 0; i < 600 && (all.empty() || all.back() != last); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    for (std::string& line : terminal.lines()) {
      if (all.empty() || all.back() != line) all.push_back(std::move(line));
    }
  }
  return all;
}

TEST(Progress, TheInnerLineIsDrawn) {
  const Terminal terminal;
  const auto start = base::Clock::now();
  std::optional<Progress> outer(std::in_place, "all of it", 3), inner;
  outer->step("the first");
  EXPECT_EQ(until(terminal, "all of it 1/3  the first"), Lines{"all of it 1/3  the first"});
  EXPECT_GE(base::seconds_since(start), 2) << "it did not take long yet";
  inner.emplace("a part", 0);
  EXPECT_EQ(until(terminal, "a part").back(), "a part");
  std::this_thread::sleep_for(std::chrono::seconds(1));
  EXPECT_EQ(until(terminal, "a part"), Lines{"a part"}) << "one of them";
  inner.reset();
  EXPECT_EQ(until(terminal, "all of it 1/3  the first").back(), "all of it 1/3  the first");
  outer->clear();
  EXPECT_EQ(until(terminal, "").back(), "");
  std::this_thread::sleep_for(std::chrono::seconds(1));
  EXPECT_EQ(terminal.lines(), Lines{}) << "until the next step begins";
  outer->step("the second");
  EXPECT_EQ(until(terminal, "all of it 2/3  the second"), Lines{"all of it 2/3  the second"});
  outer.reset();
  EXPECT_EQ(until(terminal, "").back(), "");
}

}  // namespace
}  // namespace treeattn::tools
