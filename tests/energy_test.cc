// SPDX-License-Identifier: Apache-2.0
// The energy against its definition, its gradient against finite differences, and what it refuses.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "energy_rows.h"
#include "treeattn/energy.h"
#include "treeattn/error.h"

namespace treeattn {
namespace {

using namespace testing_energy;

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
    for (const double m : {1e4, -1e4, 1e17, 1e300, energy_forward(row.in(), zeta, 1).m}) {
      EnergyGradient got = energy_shifted(row.in(), zeta, m);
      EXPECT_EQ(got.gradient, energy_and_gradient(row.in(), zeta).gradient);
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

// Chunks without keys cost nothing: a list of so many would not fit into memory.
TEST(Energy, FarMoreChunksThanKeys) {
  Random random;
  const Row row(random, 7, 5, 3);
  constexpr int kMost = std::numeric_limits<int>::max();
  EXPECT_EQ(energy_forward(row.in(), {}, kMost).energy(), energy_forward(row.in(), {}, 7).energy());
  EXPECT_EQ(tree_decode_algorithm2(row.in(), kMost).gradient, tree_decode_algorithm2(row.in(), 7).gradient);
  EXPECT_EQ(tree_decode_algorithm3(row.in(), kMost).gradient, tree_decode_algorithm3(row.in(), 7).gradient);
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
  const Vec large(5, 1e160), larger(row.k.size(), 1e147);
  expect_invalid([&] { energy_shifted({large, larger, row.v, row.keys, 5, 3, 1.0}, {}, -1.7e308); }, "m = -1.7e+308");
  expect_invalid([&] { energy_forward(row.in(), {}, 0); }, "chunks = 0");
  expect_invalid([&] { tree_decode_algorithm2(row.in(), -1); }, "chunks = -1");
  expect_invalid([&] { tree_decode_algorithm3(row.in(), 0); }, "chunks = 0");
  expect_invalid([&] { moment(row.in(), std::vector<std::int64_t>{0, 3}); }, "index = 3");
  const double* const nowhere = nullptr;
  expect_invalid(with([&](EnergyInput& in) { in.q = {nowhere, in.q.size()}; }), "q = 0x0 with 5");
  expect_invalid([&] { energy(row.in(), {nowhere, 3}); }, "zeta = 0x0 with 3");
  expect_invalid([&] { moment(row.in(), {static_cast<const std::int64_t*>(nullptr), 2}); }, "indices = 0x0 with 2");

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
  CausalEnergyInput wide = none;
  wide.v_dim = std::int64_t{1} << 62;
  EXPECT_TRUE(map_estimate(wide).z.empty());
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
