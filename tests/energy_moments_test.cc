// SPDX-License-Identifier: Apache-2.0
// The higher derivatives of the energy: moments and covariances of the values.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <vector>

#include "energy_rows.h"
#include "treeattn/energy.h"

namespace treeattn {
namespace {

using namespace testing_energy;

TEST(EnergyMoments, MeanSecondAndCovariance) {
  Random random;
  for (Row row : odd_rows()) {
    const Vec zeta = random.uniform(row.v_dim);
    for (const double offset : {0.0, 1e6, 1e10}) {  // a large mean must not eat the covariance
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
          // Errors of P weigh (v - mean)^2 <= r^2. An error of the mean enters squared, as sum P (v - mean) = 0, and is
          // taken out but for the errors of P.
          EXPECT_NEAR(got.covariance[ij], static_cast<double>(covariance),
                      error * (r * r + error * v_max * error * v_max));
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

}  // namespace
}  // namespace treeattn
