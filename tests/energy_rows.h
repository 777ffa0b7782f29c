// SPDX-License-Identifier: Apache-2.0
// What the tests of the energy share: random rows, the definition in long double, finite differences, and the errors of
// both.
//
// Tolerances are derived, first order, from u = 2^-53; see row_error. Inputs are fresh in every run; the seed is
// printed and the environment variable TREEATTN_SEED repeats it.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <random>
#include <span>
#include <vector>

#include "treeattn/energy.h"

namespace treeattn::testing_energy {

inline constexpr double kU = 0x1p-53;
using Vec = std::vector<double>;

inline std::uint64_t seed() {
  static const std::uint64_t value = [] {
    const char* text = std::getenv("TREEATTN_SEED");
    const std::uint64_t s = text ? std::strtoull(text, nullptr, 10) : std::random_device{}();
    std::cout << "TREEATTN_SEED=" << s << std::endl;
    return s;
  }();
  return value;
}

class Random {
 public:
  Vec uniform(std::int64_t n, double low = -2.0, double high = 2.0) {
    Vec x(static_cast<std::size_t>(n));
    for (double& x_i : x) x_i = std::uniform_real_distribution<double>(low, high)(engine_);
    return x;
  }

 private:
  std::mt19937_64 engine_{seed()};
};

// One row that owns its numbers.
struct Row {
  Vec q, k, v;
  std::int64_t keys, head_dim, v_dim;
  double scale;

  Row(Random& random, std::int64_t n, std::int64_t d, std::int64_t dv)
      : q(random.uniform(d)),
        k(random.uniform(n * d)),
        v(random.uniform(n * dv)),
        keys(n),
        head_dim(d),
        v_dim(dv),
        scale(1.0 / std::sqrt(static_cast<double>(d))) {}

  EnergyInput in() const { return {q, k, v, keys, head_dim, v_dim, scale}; }
  double v_at(std::int64_t a, std::int64_t i) const { return v[static_cast<std::size_t>(a * v_dim + i)]; }
};

// Self-attention that owns its numbers, and the row of one query of it.
struct Causal {
  Vec q, k, v;
  CausalEnergyInput in;
  Causal(Random& random, std::int64_t heads, std::int64_t n, std::int64_t d, std::int64_t dv)
      : q(random.uniform(heads * n * d)),
        k(random.uniform(heads * n * d)),
        v(random.uniform(heads * n * dv)),
        in{q, k, v, n, d, dv, 0.5, heads} {}
  Causal(const Causal&) = delete;

  Row row(Random& random, std::int64_t head, std::int64_t i) const {
    Row out(random, i + 1, in.head_dim, in.v_dim);
    const std::int64_t first = head * in.queries;
    std::copy_n(q.begin() + (first + i) * in.head_dim, in.head_dim, out.q.begin());
    std::copy_n(k.begin() + first * in.head_dim, (i + 1) * in.head_dim, out.k.begin());
    std::copy_n(v.begin() + first * in.v_dim, (i + 1) * in.v_dim, out.v.begin());
    out.scale = in.scale;
    return out;
  }
};

inline std::vector<Row> odd_rows() {
  Random random;
  std::vector<Row> rows;
  for (const auto& s : {std::array<int, 3>{1, 1, 1}, {2, 3, 1}, {7, 5, 3}, {33, 17, 9}, {101, 31, 13}}) {
    rows.emplace_back(random, s[0], s[1], s[2]);
  }
  return rows;
}

// The definition, in long double: F and every P_a.
struct Direct {
  long double energy = 0;
  std::vector<long double> p;
};

inline long double direct_logit(const EnergyInput& in, const Vec& zeta, std::int64_t a, bool magnitude = false) {
  const auto term = [magnitude](long double x) { return magnitude ? std::abs(x) : x; };
  long double r = 0;
  for (std::int64_t i = 0; i < in.head_dim; ++i) {
    r += term(static_cast<long double>(in.scale) * in.q[static_cast<std::size_t>(i)] *
              in.k[static_cast<std::size_t>(a * in.head_dim + i)]);
  }
  for (std::size_t i = 0; i < zeta.size(); ++i) {
    r += term(static_cast<long double>(zeta[i]) * in.v[static_cast<std::size_t>(a * in.v_dim) + i]);
  }
  return r;
}

inline Direct direct(const EnergyInput& in, const Vec& zeta) {
  Direct out;
  for (std::int64_t a = 0; a < in.keys; ++a) out.p.push_back(direct_logit(in, zeta, a));
  const long double m = *std::max_element(out.p.begin(), out.p.end());
  long double l = 0;
  for (long double& p : out.p) l += (p = std::exp(p - m));
  for (long double& p : out.p) p /= l;
  out.energy = m + std::log(l);
  return out;
}

inline long double direct_moment(const Row& row, const Direct& d, const std::vector<std::int64_t>& indices) {
  long double sum = 0;
  for (std::int64_t a = 0; a < row.keys; ++a) {
    long double product = d.p[static_cast<std::size_t>(a)];
    for (const std::int64_t i : indices) product *= row.v_at(a, i);
    sum += product;
  }
  return sum;
}

// The error of F, absolute, and of a mean of v, relative to max |v|. With L the largest sum of |terms| of a logit:
//   a logit is two dot products, a scale and a sum: (head_dim + v_dim + 4) u L;
//   exponents, running-max rescales (they telescope) and a chunk's lse: 8 roundings at most of size u (L + log N);
//   exp, products and sums over N keys, N rescales at most: 4 N u for the numerator, 4 N u for the denominator.
// The first two hit numerator and denominator, hence twice; the whole doubled covers the second order and the oracle.
// `shift` is the largest constant that is added to the logits on the way.
inline double row_error(const EnergyInput& in, const Vec& zeta, double shift = 0.0) {
  double largest = 0.0;
  for (std::int64_t a = 0; a < in.keys; ++a) {
    largest = std::max(largest, static_cast<double>(direct_logit(in, zeta, a, true)));
  }
  const double n = static_cast<double>(in.keys);
  const double range = largest + std::abs(shift) + std::log(n);
  const double ops = static_cast<double>(in.head_dim + in.v_dim + 4 + 8);
  return 2.0 * (2.0 * ops * range + 8.0 * n + 16.0) * kU;
}

inline double max_abs(std::span<const double> x) {
  double largest = 0.0;
  for (const double x_i : x) largest = std::max(largest, std::abs(x_i));
  return largest;
}

inline double spread(std::span<const double> x) {
  const auto [low, high] = std::minmax_element(x.begin(), x.end());
  return *high - *low;
}

inline void expect_is_direct(const EnergyGradient& got, const Row& row, const Vec& zeta, double shift = 0.0) {
  const Direct want = direct(row.in(), zeta);
  const double error = row_error(row.in(), zeta, shift);
  EXPECT_NEAR(got.energy, static_cast<double>(want.energy), error);
  ASSERT_EQ(got.gradient.size(), static_cast<std::size_t>(row.v_dim));
  for (std::int64_t i = 0; i < row.v_dim; ++i) {
    EXPECT_NEAR(got.gradient[static_cast<std::size_t>(i)], static_cast<double>(direct_moment(row, want, {i})),
                error * max_abs(row.v));
  }
}

// (f(x + h e_i) - f(x - h e_i)) / 2h, with the step that was really taken.
inline double central(const std::function<double(const Vec&)>& f, Vec x, std::size_t i, double h) {
  const double at = x[i];
  const double up = at + h, down = at - h;
  x[i] = up;
  const double f_up = f(x);
  x[i] = down;
  return (f_up - f(x)) / (up - down);
}

// Of a function whose value has error `e` and whose third derivative is below `third`: truncation h^2/6 third, rounding
// e/h; steps that round unequally add u |x| second. The step minimises the sum up to a constant.
struct Difference {
  double h, tolerance;
  Difference(double e, double third, double second, double x)
      : h(std::cbrt(e / third)), tolerance(h * h / 6.0 * third + e / h + 2.0 * kU * x * second) {}
};

}  // namespace treeattn::testing_energy
