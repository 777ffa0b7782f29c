// SPDX-License-Identifier: Apache-2.0
// A straight line through points, and how well it fits.
#pragma once

#include <span>

namespace treeattn::plan {

struct Line {
  double offset = 0;
  double slope = 0;
  // Largest and root mean square distance of a point from the line, relative to the point.
  double largest_residual = 0;
  double rms_residual = 0;

  double at(double x) const { return offset + slope * x; }
};

// Least squares of the relative distances, so that small values count as much as large ones. Requires two points or
// more, not all at one x, and y > 0.
Line fit_line(std::span<const double> x, std::span<const double> y);

}  // namespace treeattn::plan
