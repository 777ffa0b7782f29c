// SPDX-License-Identifier: Apache-2.0
// int8 K and V are multiplied as the integers they are, so the other factor becomes one, too: a fixed-point number of
// 16 bits, a query's element relative to the row's largest, a weight relative to the largest of the row in a tile. The
// sums of a tile are exact. Static, as it is used in files that are compiled with flags of their own (unroll.h).
#pragma once

namespace treeattn::kernels {

inline constexpr double kFixedQueryError = 0x1p-15;   // TileOps::query_error
inline constexpr double kFixedWeightFloor = 0x1p-15;  // TileOps::weight_floor
// The largest number: two signed bytes hold it. 128 times it, summed over 256 dims or 64 tokens, stays below 2^31.
inline constexpr float kMostSteps = 127 * 256;

// The largest magnitude of a row's elements; NaN if one is.
static inline double largest_magnitude(const float* row, int dim) {
  double largest = 0.0;
  for (int d = 0; d < dim; ++d) {
    const double x = __builtin_fabs(static_cast<double>(row[d]));
    largest = x > largest || x != x ? x : largest;
  }
  return largest;
}

// Calls put(d, steps) for the elements of a row. Returns what a step is worth: NaN or infinite where an element is, and
// then nothing was put: the leaf is computed again without fixed-point numbers.
template <class Put>
static inline float fix_query(const float* row, int dim, const Put& put) {
  const double largest = largest_magnitude(row, dim);
  if (largest > 0.0 && largest < 1e300) {
    for (int d = 0; d < dim; ++d) {
      put(d, static_cast<int>(__builtin_rint(static_cast<double>(row[d]) / largest * double{kMostSteps})));
    }
  }
  return static_cast<float>(largest / double{kMostSteps});
}

// What brings a row's weights to steps, and back. Two factors, as the weights may be too small for one.
struct FixedPoint {
  float first;  // weight * first * second is at most kMostSteps in size
  float second;
  float unit;  // one step is worth this
};

static inline FixedPoint fixed_point_up_to(float largest) {
  if (largest == 0.0f) return {0.0f, 0.0f, 0.0f};
  const float first = largest < 0x1p-60f ? 0x1p80f : 1.0f;
  return {first, kMostSteps / (largest * first), largest / kMostSteps};
}

}  // namespace treeattn::kernels
