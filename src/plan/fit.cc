// SPDX-License-Identifier: Apache-2.0
#include "plan/fit.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace treeattn::plan {

Line fit_line(std::span<const double> x, std::span<const double> y) {
  base::require(x.size() == y.size() && x.size() >= 2, "{} x and {} y; accepted: as many of each, 2 or more", x.size(),
                y.size());
  double weights = 0, mean_x = 0, mean_y = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    base::require(std::isfinite(x[i]) && std::isfinite(y[i]) && y[i] > 0,
                  "point {} is ({}, {}); accepted: finite, y above 0", i, x[i], y[i]);
    const double weight = 1 / (y[i] * y[i]);
    weights += weight;
    mean_x += weight * x[i];
    mean_y += weight * y[i];
  }
  mean_x /= weights;
  mean_y /= weights;
  double xx = 0, xy = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double weight = 1 / (y[i] * y[i]);
    xx += weight * (x[i] - mean_x) * (x[i] - mean_x);
    xy += weight * (x[i] - mean_x) * (y[i] - mean_y);
  }
  base::require(xx > 0, "all points have x = {}; accepted: two different x", x[0]);
  Line line{.offset = mean_y - xy / xx * mean_x, .slope = xy / xx};
  double squares = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double residual = std::fabs(line.at(x[i]) - y[i]) / y[i];
    line.largest_residual = std::max(line.largest_residual, residual);
    squares += residual * residual;
  }
  line.rms_residual = std::sqrt(squares / static_cast<double>(x.size()));
  return line;
}

}  // namespace treeattn::plan
