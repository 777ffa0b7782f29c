// SPDX-License-Identifier: Apache-2.0
// The energy of whole self-attention, and its place in the posterior: the claims of the paper.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "energy_rows.h"
#include "treeattn/energy.h"

namespace treeattn {
namespace {

using namespace testing_energy;

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
    EXPECT_EQ(shifted.gradient, got.gradient);
    long double total = 0, total_shift = 0;
    double error = 0.0, shifted_error = 0.0;
    for (std::int64_t i = 0; i < 3 * 13; ++i) {
      const Row row = c.row(random, i / 13, i % 13);
      const Vec source = slice(zeta, i * 5, 5);
      const double m = shift[static_cast<std::size_t>(i)];
      const Direct d = direct(row.in(), source);
      expect_is_direct({static_cast<double>(d.energy), slice(got.gradient, i * 5, 5)}, row, source);
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

TEST(EnergyBayes, AGradientThatIsNotANumberIsNotStationary) {
  // Query 2 sums the first two values, which overflows, before its large logit takes their weight away: inf * 0. The
  // other two queries have each one key that counts.
  const Vec q = {1.0, 0.0, 1000.0, 0.0, 0.0, 1000.0};
  const Vec k = {0.0, 0.0, 1.0, 0.0, 0.0, 1.0};
  const Vec v = {1.5e308, 1.5e308, 1.0};
  const CausalEnergyInput in{.q = q, .k = k, .v = v, .queries = 3, .head_dim = 2, .v_dim = 1};
  const MapEstimate point{Vec(3), {1.5e308, 1.5e308, 7.0}, 0.0};
  EXPECT_TRUE(std::isnan(log_likelihood(in, {}, point.z).grad_zeta[2]));
  EXPECT_TRUE(std::isnan(stationarity(in, point).zeta_norm));
}

}  // namespace
}  // namespace treeattn
