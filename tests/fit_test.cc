// SPDX-License-Identifier: Apache-2.0
// Lines are found again, and what is no line shows in the residual.
#include "plan/fit.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "treeattn/error.h"

namespace treeattn::plan {
namespace {

TEST(FitTest, FindsALineAgain) {
  std::mt19937 random(3);
  std::uniform_real_distribution<double> number(0.1, 100);
  for (int i = 0; i < 100; ++i) {
    const double offset = number(random), slope = number(random);
    std::vector<double> x, y;
    for (int k = 0; k < 2 + i % 7; ++k) {
      x.push_back(k + number(random) / 1000);
      y.push_back(offset + slope * x.back());
    }
    const Line line = fit_line(x, y);
    EXPECT_NEAR(line.offset, offset, 1e-8 * (offset + slope));
    EXPECT_NEAR(line.slope, slope, 1e-8 * (offset + slope));
    EXPECT_LT(line.largest_residual, 1e-9);
  }
}

TEST(FitTest, TheResidualTellsALineFromACurve) {
  std::vector<double> p, log_p, time;
  for (int k = 1; k <= 12; ++k) {
    p.push_back(std::exp2(k));
    log_p.push_back(k);
    time.push_back(100 + 7 * k);
  }
  EXPECT_LT(fit_line(log_p, time).largest_residual, 1e-12);
  EXPECT_GT(fit_line(p, time).largest_residual, 0.1);
  EXPECT_GE(fit_line(p, time).largest_residual, fit_line(p, time).rms_residual);
}

TEST(FitTest, SmallValuesCountAsMuchAsLargeOnes) {
  // A point 10 % off at y = 1 and one 10 % off at y = 1000 pull alike.
  const std::vector<double> x = {1, 1, 1000, 1000}, y = {0.9, 1.1, 900, 1100};
  const Line line = fit_line(x, y);
  EXPECT_NEAR(line.at(1), 1, 0.03);
  EXPECT_NEAR(line.at(1000), 1000, 30);
}

TEST(FitTest, RefusesWhatIsNoLine) {
  using Numbers = std::vector<double>;
  EXPECT_THROW(fit_line(Numbers{1}, Numbers{1}), InvalidArgument);
  EXPECT_THROW(fit_line(Numbers{1, 2}, Numbers{1}), InvalidArgument);
  EXPECT_THROW(fit_line(Numbers{1, 1}, Numbers{1, 2}), InvalidArgument);
  EXPECT_THROW(fit_line(Numbers{1, 2}, Numbers{1, 0}), InvalidArgument);
  EXPECT_THROW(fit_line(Numbers{1, 2}, Numbers{1, NAN}), InvalidArgument);
}

}  // namespace
}  // namespace treeattn::plan
