// SPDX-License-Identifier: Apache-2.0
// What the tests of the merge share: random states, calls on single rows, and the merge in double with its error bound.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "treeattn/state.h"

namespace treeattn::testing_states {

using Row = std::vector<float>;  // [m_log2, l, o ...]

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr double kLn2 = 0x1.62e42fefa39efp-1;
inline constexpr int kDim = 24;

inline float from_bits(std::uint32_t bits) { return std::bit_cast<float>(bits); }

class Random {
 public:
  Random() : engine_(seed()) {}

  double uniform(double low, double high) { return std::uniform_real_distribution<double>(low, high)(engine_); }
  float normal() { return std::normal_distribution<float>()(engine_); }
  int integer(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine_); }

  // A state as attention makes them: l in [1, 4096), o of the size of l, or far smaller.
  Row state(double m_low, double m_high) {
    Row row(state_floats(kDim));
    row[0] = static_cast<float>(uniform(m_low, m_high));
    row[1] = static_cast<float>(std::exp2(uniform(0, 12)));
    for (int i = 0; i < kDim; ++i) {
      row[static_cast<std::size_t>(2 + i)] = normal() * row[1] * static_cast<float>(std::exp2(uniform(-30, 0)));
    }
    return row;
  }

 private:
  static std::uint64_t seed() {
    static const std::uint64_t chosen = [] {
      const char* forced = std::getenv("TREEATTN_SEED");
      const auto now = static_cast<std::uint64_t>(std::chrono::system_clock::now().time_since_epoch().count());
      const std::uint64_t value = forced != nullptr ? std::strtoull(forced, nullptr, 10) : now;
      std::printf("TREEATTN_SEED=%llu\n", static_cast<unsigned long long>(value));
      return value;
    }();
    return chosen;
  }

  std::mt19937_64 engine_;
};

inline Row identity(int dim = kDim) {
  Row row(state_floats(dim), kNan);
  identity_states(row, dim);
  return row;
}

inline Row merged(Row lower, const Row& higher) {
  merge_states(lower, higher, static_cast<std::int64_t>(lower.size()) - 2);
  return lower;
}

inline bool same_bits(const Row& a, const Row& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

inline bool is_nan(float x) { return std::isnan(x); }
inline bool is_finite(float x) { return std::isfinite(x); }

struct Final {
  Row out;
  float lse = kNan;
};

inline Final finalized(const Row& row, std::vector<float> sinks = {}) {
  Final result{Row(row.size() - 2, kNan)};
  finalize_states(row, static_cast<std::int64_t>(row.size()) - 2, sinks, result.out, {&result.lse, 1});
  return result;
}

// A state in double, and how far a float32 state made by the same merges may be from it.
//
// One merge, u = 2^-24. The maximum is exact. A side with maximum m has d = m - m_union, which float32 rounds to
// d (1 + u); its weight is off by a factor of at most 1 + ln 2 |d| u for that and 1 + 2^-22 for exp2_weight, both
// exactly 1 where d = 0. Below d = -126 the weight is 2^-126 instead of less. The product of the higher side and the
// fused sum each round once more, which is u of the magnitudes, or half of 2^-149 among the denormals. What either
// side was off by before is weighed like the side. kSecondOrder covers the products of these small terms and the
// double arithmetic itself.
struct Exact {
  double m = -INFINITY;
  std::vector<double> x, off;  // l and o

  Exact() = default;
  explicit Exact(const Row& row) : m(row[0]), x(row.begin() + 1, row.end()), off(x.size(), 0.0) {}
};

inline Exact merged(const Exact& lower, const Exact& higher) {
  constexpr double u = 0x1p-24, kSecondOrder = 1.001;
  if (std::isinf(higher.m)) return lower;
  if (std::isinf(lower.m)) return higher;
  Exact result;
  result.m = std::max(lower.m, higher.m);
  result.x.assign(lower.x.size(), 0.0);
  result.off.assign(lower.x.size(), 0x1p-149);
  for (const Exact* side : {&lower, &higher}) {
    const double d = side->m - result.m;
    const double w = std::exp2(d);
    const double weight_off = d == 0 ? 0 : d < -126 ? 0x1.0001p-126 : w * (0x1p-22 + kLn2 * -d * u);
    for (std::size_t i = 0; i < side->x.size(); ++i) {
      const double size = std::fabs(side->x[i]) + side->off[i];
      result.x[i] += side->x[i] * w;
      result.off[i] += kSecondOrder * (side->off[i] * w + size * (weight_off + 2 * u * (w + weight_off)));
    }
  }
  return result;
}

inline void expect_near(const Row& got, const Exact& want) {
  ASSERT_EQ(got.size(), want.x.size() + 1);
  EXPECT_EQ(got[0], static_cast<float>(want.m));
  for (std::size_t i = 0; i < want.x.size(); ++i) {
    EXPECT_LE(std::fabs(got[i + 1] - want.x[i]), want.off[i]) << "component " << i << ", wanted " << want.x[i];
  }
}

}  // namespace treeattn::testing_states
