// SPDX-License-Identifier: Apache-2.0
// The energy against its definition in long double, against finite differences, and against the paper's claims.
//
// Tolerances are derived, first order, from u = 2^-53; see row_error. Inputs are fresh in every run; the seed is
// printed and the environment variable TREEATTN_SEED repeats it.
#include "treeattn/energy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "treeattn/error.h"

namespace treeattn {
namespace {

constexpr double kU = 0x1p-53;
using Vec = std::vector<double>;

std::uint64_t seed() {
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

std::vector<Row> odd_rows() {
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

long double direct_logit(const EnergyInput& in, const Vec& zeta, std::int64_t a, bool magnitude = false) {
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

Direct direct(const EnergyInput& in, const Vec& zeta) {
  Direct out;
  for (std::int64_t a = 0; a < in.keys; ++a) out.p.push_back(direct_logit(in, zeta, a));
  const long double m = *std::max_element(out.p.begin(), out.p.end());
  long double l = 0;
  for (long double& p : out.p) l += (p = std::exp(p - m));
  for (long double& p : out.p) p /= l;
  out.energy = m + std::log(l);
  return out;
}

long double direct_moment(const Row& row, const Direct& d, const std::vector<std::int64_t>& indices) {
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
double row_error(const EnergyInput& in, const Vec& zeta, double shift = 0.0) {
  double largest = 0.0;
  for (std::int64_t a = 0; a < in.keys; ++a) {
    largest = std::max(largest, static_cast<double>(direct_logit(in, zeta, a, true)));
  }
  const double n = static_cast<double>(in.keys);
  const double range = largest + std::abs(shift) + std::log(n);
  const double ops = static_cast<double>(in.head_dim + in.v_dim + 4 + 8);
  return 2.0 * (2.0 * ops * range + 8.0 * n + 16.0) * kU;
}

double max_abs(std::span<const double> x) {
  double largest = 0.0;
  for (const double x_i : x) largest = std::max(largest, std::abs(x_i));
  return largest;
}

double spread(std::span<const double> x) {
  const auto [low, high] = std::minmax_element(x.begin(), x.end());
  return *high - *low;
}

void expect_is_direct(const EnergyGradient& got, const Row& row, const Vec& zeta, double shift = 0.0) {
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
double central(const std::function<double(const Vec&)>& f, Vec x, std::size_t i, double h) {
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

TEST(Energy, IsItsDefinition) {
  Random random;
  for (const Row& row : odd_rows()) {
    for (const Vec& zeta : {Vec{}, random.uniform(row.v_dim)}) {
      const EnergyGradient got = energy_and_gradient(row.in(), zeta);
      expect_is_direct(got, row, zeta);
      EXPECT_EQ(energy(row.in(), zeta), got.energy);
    }
    const Vec zeros(static_cast<std::size_t>(row.v_dim), 0.0);
    EXPECT_EQ(energy_and_gradient(row.in(), zeros).gradient, energy_and_gradient(row.in()).gradient);
  }
}

TEST(Energy, GradientIsTheFiniteDifferenceOfTheEnergy) {
  Random random;
  for (const Row& row : odd_rows()) {
    for (const Vec& zeta : {Vec(static_cast<std::size_t>(row.v_dim), 0.0), random.uniform(row.v_dim)}) {
      // The n-th derivatives of F are cumulants of v, at most r^2, r^3 for v within r.
      const double r = 2.0 * max_abs(row.v);
      const Difference d(row_error(row.in(), zeta), r * r * r, r * r, max_abs(zeta));
      const Vec gradient = energy_and_gradient(row.in(), zeta).gradient;
      for (std::size_t i = 0; i < gradient.size(); ++i) {
        EXPECT_NEAR(gradient[i], central([&](const Vec& x) { return energy(row.in(), x); }, zeta, i, d.h), d.tolerance);
      }
    }
  }
}

TEST(Energy, ShiftChangesTheEnergyAndNotTheGradient) {
  Random random;
  for (const Row& row : odd_rows()) {
    const Vec zeta = random.uniform(row.v_dim);
    for (const double m : {1e4, -1e4, energy_forward(row.in(), zeta, 1).m}) {
      EnergyGradient got = energy_shifted(row.in(), zeta, m);
      got.energy += m;
      expect_is_direct(got, row, zeta, m);
    }
  }
}

TEST(Energy, LogitsNear1e5) {
  for (Row row : odd_rows()) {
    for (const double offset : {1e5, -1e5, 1e4, -1e4}) {
      // The first coordinate adds the same offset to every logit; the others keep them a few apart.
      row.q[0] = 1.0 / row.scale;
      for (std::int64_t a = 0; a < row.keys; ++a) row.k[static_cast<std::size_t>(a * row.head_dim)] = offset;
      expect_is_direct(energy_and_gradient(row.in()), row, {});
      expect_is_direct(tree_decode_algorithm2(row.in(), 3), row, {});
      expect_is_direct(tree_decode_algorithm3(row.in(), 3), row, {});
    }
  }
}

TEST(Energy, LogitsFarApart) {
  for (Row row : odd_rows()) {
    for (double& q : row.q) q *= 1e5;  // all but one weight underflow, whole chunks of them
    expect_is_direct(energy_and_gradient(row.in()), row, {});
    expect_is_direct(tree_decode_algorithm2(row.in(), 5), row, {});
    expect_is_direct(tree_decode_algorithm3(row.in(), 5), row, {});
  }
}

TEST(Energy, AlgorithmsOverAnyNumberOfChunks) {
  Random random;
  for (const Row& row : odd_rows()) {
    const Vec zeta = random.uniform(row.v_dim);
    for (const int chunks : {1, 2, 3, 5, 7, 8, static_cast<int>(row.keys), static_cast<int>(row.keys) + 5}) {
      const EnergyForward forward = energy_forward(row.in(), zeta, chunks);
      EXPECT_NEAR(forward.energy(), energy(row.in(), zeta), row_error(row.in(), zeta));
      EXPECT_GE(forward.lse, 0.0);  // of the shifted logits: one of them is 0
      EXPECT_EQ(forward.m, energy_forward(row.in(), zeta, 1).m);
      expect_is_direct(tree_decode_algorithm2(row.in(), chunks), row, {});
      expect_is_direct(tree_decode_algorithm3(row.in(), chunks), row, {});
    }
  }
}

TEST(EnergyMoments, MeanSecondAndCovariance) {
  Random random;
  for (Row row : odd_rows()) {
    const Vec zeta = random.uniform(row.v_dim);
    for (const double offset : {0.0, 1e6}) {  // a large mean must not eat the covariance
      for (double& v : row.v) v += offset;
      const Vec at = offset == 0.0 ? zeta : Vec{};
      const Moments got = moments(row.in(), at);
      const Direct d = direct(row.in(), at);
      const double error = row_error(row.in(), at), v_max = max_abs(row.v), r = spread(row.v);
      for (std::int64_t i = 0; i < row.v_dim; ++i) {
        const long double mean_i = direct_moment(row, d, {i});
        EXPECT_NEAR(got.mean[static_cast<std::size_t>(i)], static_cast<double>(mean_i), error * v_max);
        for (std::int64_t j = 0; j < row.v_dim; ++j) {
          const long double mean_j = direct_moment(row, d, {j});
          long double covariance = 0;
          for (std::int64_t a = 0; a < row.keys; ++a) {
            covariance += d.p[static_cast<std::size_t>(a)] * (row.v_at(a, i) - mean_i) * (row.v_at(a, j) - mean_j);
          }
          const auto ij = static_cast<std::size_t>(i * row.v_dim + j), ji = static_cast<std::size_t>(j * row.v_dim + i);
          EXPECT_NEAR(got.second[ij], static_cast<double>(direct_moment(row, d, {i, j})), error * v_max * v_max);
          // Errors of P weigh (v - mean)^2 <= r^2; an error of the mean enters squared, as sum P (v - mean) = 0.
          EXPECT_NEAR(got.covariance[ij], static_cast<double>(covariance),
                      error * r * r + error * v_max * error * v_max);
          EXPECT_EQ(got.covariance[ij], got.covariance[ji]);
          EXPECT_EQ(got.second[ij], got.second[ji]);
        }
      }
    }
  }
}

TEST(EnergyMoments, CovarianceIsTheFiniteDifferenceOfTheGradient) {
  Random random;
  for (const Row& row : odd_rows()) {
    const Vec zeta = random.uniform(row.v_dim);
    // Of the gradient the second derivative is a third cumulant, <= r^3, the third a fourth, <= 4 r^4.
    const double r = 2.0 * max_abs(row.v);
    const Difference d(row_error(row.in(), zeta) * r, 4.0 * std::pow(r, 4), std::pow(r, 3), max_abs(zeta));
    const Moments got = moments(row.in(), zeta);
    const auto dim = static_cast<std::size_t>(row.v_dim);
    for (std::size_t i = 0; i < dim; ++i) {
      for (std::size_t j = 0; j < dim; ++j) {
        const auto f = [&](const Vec& x) { return energy_and_gradient(row.in(), x).gradient[j]; };
        EXPECT_NEAR(got.covariance[i * dim + j], central(f, zeta, i, d.h), d.tolerance);
      }
    }
  }
}

TEST(EnergyMoments, CovarianceIsPositiveSemidefinite) {
  Random random;
  for (const auto& s : {std::array<int, 3>{3, 5, 11}, {101, 7, 11}}) {  // of rank 2 at most, and of full rank
    const Row row(random, s[0], s[1], s[2]);
    Vec c = moments(row.in()).covariance;
    const auto dim = static_cast<std::size_t>(row.v_dim);
    // A Cholesky factorisation of C + e I exists, so no eigenvalue is below -e; e is the error of C in norm, dim times
    // that of an element, and (dim + 1)^2 u |C| of the factorisation itself, each row and column once.
    const double r = spread(row.v), n = static_cast<double>(dim);
    const double e = n * row_error(row.in(), {}) * r * r + 2.0 * (n + 1.0) * (n + 1.0) * kU * n * r * r;
    for (std::size_t j = 0; j < dim; ++j) {
      double pivot = c[j * dim + j] + e;
      for (std::size_t l = 0; l < j; ++l) pivot -= c[j * dim + l] * c[j * dim + l];
      ASSERT_GT(pivot, 0.0) << "column " << j;
      c[j * dim + j] = std::sqrt(pivot);
      for (std::size_t i = j + 1; i < dim; ++i) {
        for (std::size_t l = 0; l < j; ++l) c[i * dim + j] -= c[i * dim + l] * c[j * dim + l];
        c[i * dim + j] /= c[j * dim + j];
      }
    }
  }
}

TEST(EnergyMoments, AnyOrder) {
  Random random;
  const Row row(random, 37, 11, 3);
  const Direct d = direct(row.in(), {});
  const std::vector<std::vector<std::int64_t>> orders = {{0},       {2, 1},       {0, 1, 2},
                                                         {1, 1, 0}, {2, 2, 2, 2}, {0, 1, 2, 0, 1}};
  for (const auto& indices : orders) {
    const double scale = std::pow(max_abs(row.v), static_cast<double>(indices.size()));
    EXPECT_NEAR(moment(row.in(), indices), static_cast<double>(direct_moment(row, d, indices)),
                row_error(row.in(), {}) * scale);
  }
  EXPECT_EQ(moment(row.in(), {}), 1.0);

  // The third cumulant, put together from moments, is the derivative of the covariance; the third derivative of that
  // is a fifth cumulant, mu_5 - 10 mu_2 mu_3 <= 11 r^5 in size, the second a fourth.
  const auto mean = [&](std::vector<std::int64_t> i) { return moment(row.in(), i); };
  const double third = mean({0, 1, 2}) - mean({0, 1}) * mean({2}) - mean({0, 2}) * mean({1}) -
                       mean({1, 2}) * mean({0}) + 2.0 * mean({0}) * mean({1}) * mean({2});
  const double r = 2.0 * max_abs(row.v), error = row_error(row.in(), {});
  const Difference step(2.0 * error * r * r, 11.0 * std::pow(r, 5), 4.0 * std::pow(r, 4), 0.0);
  const auto covariance = [&](const Vec& x) { return moments(row.in(), x).covariance[1]; };
  EXPECT_NEAR(third, central(covariance, Vec(3, 0.0), 2, step.h), step.tolerance + 12.0 * error * r * r * r);
}

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

Vec slice(const Vec& x, std::int64_t begin, std::int64_t size) {
  return x.empty() ? Vec{} : Vec(x.begin() + begin, x.begin() + begin + size);
}

TEST(EnergyCausal, TotalIsTheSumOverQueriesAndHeads) {
  Random random;
  const Causal c(random, 3, 13, 7, 5);
  const Vec shift = random.uniform(3 * 13, -1e4, 1e4);
  for (const Vec& zeta : {Vec{}, random.uniform(3 * 13 * 5)}) {
    const EnergyGradient got = causal_energy_and_gradient(c.in, zeta);
    const EnergyGradient shifted = causal_energy_shifted(c.in, zeta, shift);
    long double total = 0, total_shift = 0;
    double error = 0.0, shifted_error = 0.0;
    for (std::int64_t i = 0; i < 3 * 13; ++i) {
      const Row row = c.row(random, i / 13, i % 13);
      const Vec source = slice(zeta, i * 5, 5);
      const double m = shift[static_cast<std::size_t>(i)];
      const Direct d = direct(row.in(), source);
      expect_is_direct({static_cast<double>(d.energy), slice(got.gradient, i * 5, 5)}, row, source);
      expect_is_direct({static_cast<double>(d.energy), slice(shifted.gradient, i * 5, 5)}, row, source, m);
      total += d.energy;
      total_shift += m;
      // One more rounding of the running total per row: it is below 39 rows of the largest.
      error += row_error(row.in(), source) + kU * 39.0 * 20.0;
      shifted_error += row_error(row.in(), source, m) + kU * 39.0 * 1e4;
    }
    EXPECT_NEAR(got.energy, static_cast<double>(total), error);
    EXPECT_NEAR(shifted.energy, static_cast<double>(total - total_shift), shifted_error);

    EnergyGradient heads;
    for (std::int64_t h = 0; h < 3; ++h) {
      const Vec q = slice(c.q, h * 91, 91), k = slice(c.k, h * 91, 91), v = slice(c.v, h * 65, 65);
      const EnergyGradient one = causal_energy_and_gradient({q, k, v, 13, 7, 5, 0.5, 1}, slice(zeta, h * 65, 65));
      heads.energy += one.energy;
      heads.gradient.insert(heads.gradient.end(), one.gradient.begin(), one.gradient.end());
    }
    EXPECT_EQ(heads.gradient, got.gradient);
    EXPECT_NEAR(heads.energy, got.energy, error);
  }
}

TEST(EnergyBayes, StationaryAtZeroAndAttentionOnly) {
  Random random;
  const Causal c(random, 2, 9, 5, 3);
  const MapEstimate map = map_estimate(c.in);
  EXPECT_EQ(map.zeta, Vec(2 * 9 * 3, 0.0));
  EXPECT_EQ(map.z, causal_energy_and_gradient(c.in).gradient);
  EXPECT_EQ(map.value, -causal_energy_and_gradient(c.in).energy);
  const Stationarity at = stationarity(c.in, map);
  EXPECT_EQ(at.zeta_norm, 0.0);
  EXPECT_EQ(at.z_norm, 0.0);

  const Vec other = random.uniform(2 * 9 * 3, 0.5, 2.0);
  EXPECT_GE(stationarity(c.in, {other, map.z, 0.0}).z_norm, 0.5);
  EXPECT_GT(stationarity(c.in, {other, map.z, 0.0}).zeta_norm, 1e-3);  // C zeta to first order: v is not constant
  Vec moved = map.z;
  for (double& z : moved) z += 0.25;
  EXPECT_NEAR(stationarity(c.in, {map.zeta, moved, 0.0}).zeta_norm, 0.25 * std::sqrt(54.0),
              1e-12);  // 54 roundings of 4
  EXPECT_EQ(stationarity(c.in, {map.zeta, moved, 0.0}).z_norm, 0.0);
}

TEST(EnergyBayes, GradientsAreTheFiniteDifferencesOfGamma) {
  Random random;
  const Causal c(random, 2, 9, 5, 3);
  const MapEstimate map = map_estimate(c.in);
  const Vec zeta = random.uniform(54), z = random.uniform(54);
  double error = 2.0 * 54.0 * 56.0 * 4.0 * kU;  // the dot product z . zeta, 54 terms of 4 at most
  for (std::int64_t i = 0; i < 18; ++i) {
    error += row_error(c.row(random, i / 9, i % 9).in(), slice(zeta, i * 3, 3)) + kU * 18.0 * 20.0;
  }
  const Difference in_zeta(error, 64.0, 16.0, 2.0);  // r = 4
  const Difference in_z(error, 1e-3, 0.0, 0.0);      // linear: any third derivative bounds it
  for (const auto& [at, z_at] : {std::pair{map.zeta, map.z}, std::pair{zeta, z}}) {
    const LogLikelihood gamma = log_likelihood(c.in, at, z_at);
    for (std::size_t i = 0; i < 54; ++i) {
      const auto of_zeta = [&](const Vec& x) { return log_likelihood(c.in, x, z_at).value; };
      const auto of_z = [&](const Vec& x) { return log_likelihood(c.in, at, x).value; };
      EXPECT_NEAR(gamma.grad_zeta[i], central(of_zeta, at, i, in_zeta.h), in_zeta.tolerance);
      EXPECT_NEAR(gamma.grad_z[i], central(of_z, z_at, i, in_z.h), in_z.tolerance);
    }
  }
}

TEST(EnergyBayes, TheStationaryPointIsASaddle) {
  Random random;
  const Causal c(random, 1, 9, 5, 3);
  const MapEstimate map = map_estimate(c.in);
  for (int trial = 0; trial < 20; ++trial) {
    const Vec zeta = random.uniform(27);
    EXPECT_LT(log_likelihood(c.in, zeta, map.z).value, map.value);  // concave in zeta: a maximum there ...
    // ... and z = z* + 100 zeta adds 100 |zeta|^2, where the curvature of F takes at most 3 (r / 2)^2 / 2 = 6 of them.
    Vec z = map.z;
    const Vec step = random.uniform(27, 0.01, 0.02);
    for (std::size_t i = 0; i < z.size(); ++i) z[i] += 100.0 * step[i];
    EXPECT_GT(log_likelihood(c.in, step, z).value, map.value);
  }
}

void expect_invalid(const std::function<void()>& call, const std::string& value) {
  try {
    call();
    ADD_FAILURE() << "nothing thrown; wanted a message with '" << value << "'";
  } catch (const InvalidArgument& e) {
    EXPECT_NE(std::string(e.what()).find(value), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("accepted"), std::string::npos) << e.what();
  }
}

TEST(EnergyBadInput, NamesTheValue) {
  Random random;
  const Row row(random, 7, 5, 3);
  const auto with = [&](auto change) {
    EnergyInput in = row.in();
    change(in);
    return [in] { energy(in); };
  };
  const Vec nan_row = [&] {
    Vec k = row.k;
    k[3] = std::nan("");
    return k;
  }();
  const Vec inf_q(5, std::numeric_limits<double>::infinity()), huge(5, 1e308);
  expect_invalid(with([](EnergyInput& in) { in.keys = 8; }), "35");
  expect_invalid(with([](EnergyInput& in) { in.keys = -1; }), "-1");
  expect_invalid(with([](EnergyInput& in) { in.head_dim = 0; }), "head_dim = 0");
  expect_invalid(with([](EnergyInput& in) { in.v_dim = -3; }), "v_dim = -3");
  expect_invalid(with([](EnergyInput& in) { in.q = in.q.first(4); }), "q has 4");
  expect_invalid(with([](EnergyInput& in) { in.v = in.v.first(20); }), "v has 20");
  expect_invalid(with([](EnergyInput& in) { in.scale = std::nan(""); }), "scale = nan");
  expect_invalid(with([&](EnergyInput& in) { in.k = nan_row; }), "k[3] = nan");
  expect_invalid(with([&](EnergyInput& in) { in.q = inf_q; }), "q[0] = inf");
  expect_invalid(with([&](EnergyInput& in) {
                   in.q = huge;
                   in.scale = 1e300;
                 }),
                 "logit of key 0");
  expect_invalid([&] { energy(row.in(), Vec(2, 0.0)); }, "zeta has 2");
  expect_invalid([&] { energy_shifted(row.in(), {}, std::nan("")); }, "m = nan");
  expect_invalid([&] { energy_forward(row.in(), {}, 0); }, "chunks = 0");
  expect_invalid([&] { tree_decode_algorithm2(row.in(), -1); }, "chunks = -1");
  expect_invalid([&] { tree_decode_algorithm3(row.in(), 0); }, "chunks = 0");
  expect_invalid([&] { moment(row.in(), std::vector<std::int64_t>{0, 3}); }, "index = 3");

  const Causal c(random, 2, 3, 5, 3);
  expect_invalid(
      [&] {
        CausalEnergyInput in = c.in;
        in.heads = 3;
        causal_energy_and_gradient(in);
      },
      "q has 30");
  expect_invalid(
      [&] {
        CausalEnergyInput in = c.in;
        in.heads = 0;
        causal_energy_and_gradient(in);
      },
      "heads = 0");
  expect_invalid([&] { causal_energy_shifted(c.in, {}, Vec(5, 0.0)); }, "m has 5");
  expect_invalid([&] { log_likelihood(c.in, {}, Vec(17, 0.0)); }, "z has 17");
  expect_invalid([&] { log_likelihood(c.in, {}, Vec(18, std::nan(""))); }, "z[0] = nan");
}

TEST(EnergyBadInput, NoKeys) {
  const Vec q(5, 1.0);
  const EnergyInput in{q, {}, {}, 0, 5, 3, 1.0};
  const double minus_infinity = -std::numeric_limits<double>::infinity();
  EXPECT_EQ(energy(in), minus_infinity);
  EXPECT_EQ(energy_forward(in, {}, 4).m, minus_infinity);
  EXPECT_EQ(energy_forward(in, {}, 4).energy(), minus_infinity);
  for (const auto& call : {std::function<void()>([&] { energy_and_gradient(in); }),
                           {[&] { energy_shifted(in, {}, 1.0); }},
                           {[&] { tree_decode_algorithm2(in, 2); }},
                           {[&] { tree_decode_algorithm3(in, 2); }},
                           {[&] { moments(in); }},
                           {[&] { moment(in, {}); }}}) {
    expect_invalid(call, "keys = 0");
  }
  const CausalEnergyInput none{{}, {}, {}, 0, 5, 3, 1.0, 2};
  EXPECT_EQ(causal_energy_and_gradient(none).energy, 0.0);
  EXPECT_TRUE(map_estimate(none).z.empty());
}

// The listing of docs/energy.md, line for line. Tolerances: the next Taylor term is r^3 zeta^3 / 6 with r = 4, about
// 1e-11; and a few roundings of numbers below 8, at 2^-50 each.
TEST(EnergyDocs, Example) {
  const std::vector<double> q = {1.0, 0.5};                       // [head_dim]
  const std::vector<double> k = {0.2, 1.0, -0.3, 0.4, 1.1, 0.0};  // [keys, head_dim]
  const std::vector<double> v = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0};   // [keys, v_dim]
  const treeattn::EnergyInput in{q, k, v, 3, 2, 2, 1.0};

  const treeattn::EnergyGradient f = treeattn::energy_and_gradient(in);           // F(0), and attention
  const treeattn::EnergyGradient tree = treeattn::tree_decode_algorithm3(in, 2);  // the same over two devices
  const treeattn::Moments m = treeattn::moments(in);                              // m.covariance is d2F/dzeta2

  const std::vector<double> zeta = {1e-4, 0.0};  // F(zeta) = F(0) + z . zeta + zeta C zeta / 2 + O(zeta^3)
  const double taylor = f.energy + f.gradient[0] * zeta[0] + m.covariance[0] * zeta[0] * zeta[0] / 2.0;
  EXPECT_NEAR(treeattn::energy(in, zeta), taylor, 1e-10);
  EXPECT_NEAR(tree.gradient[1], f.gradient[1], 1e-14);
}

}  // namespace
}  // namespace treeattn
