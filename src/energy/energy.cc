// SPDX-License-Identifier: Apache-2.0
// The energy of one query, its gradient, and the moments of v that its derivatives are.
#include "treeattn/energy.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "energy/checks.h"
#include "energy/softmax.h"

namespace treeattn {

using namespace energy_internal;

double energy_internal::logit(const EnergyInput& in, std::span<const double> zeta, std::int64_t key) {
  double r = in.scale * dot(in.q, row_of(in.k, key, in.head_dim));
  if (!zeta.empty()) r += dot(zeta, row_of(in.v, key, in.v_dim));
  base::require(std::isfinite(r), "logit of key {} = {}; accepted: q, k, zeta and v whose logits fit in double", key,
                r);
  return r;
}

double OnlineSoftmax::energy_shifted_by(double shift) const {
  const double shifted = m_ - shift;
  base::require(std::isfinite(shifted), "m = {} with logits up to {}; accepted: a difference that fits in double",
                shift, m_);
  return shifted + std::log(l_);
}

namespace {

// P_a: the attention distribution tilted by zeta. Two passes over stored logits, since the moments need every P_a
// again.
std::vector<double> probabilities(const EnergyInput& in, std::span<const double> zeta) {
  std::vector<double> p(index(in.keys));
  double m = kMinusInfinity;
  for (std::int64_t a = 0; a < in.keys; ++a) {
    p[index(a)] = logit(in, zeta, a);
    m = std::max(m, p[index(a)]);
  }
  double l = 0.0;
  for (double& p_a : p) {
    p_a = std::exp(p_a - m);
    l += p_a;
  }
  // Divided by l, not exp(logit - F): at |F| near 1e5 the rounding of F would be a relative error of every P_a.
  for (double& p_a : p) p_a /= l;
  return p;
}

}  // namespace

double energy(const EnergyInput& in, std::span<const double> zeta) {
  check_input(in, zeta);
  OnlineSoftmax sum(0);  // v_dim 0: F alone needs no numerator
  for (std::int64_t a = 0; a < in.keys; ++a) sum.add(logit(in, zeta, a), {});
  return sum.energy();
}

EnergyGradient energy_and_gradient(const EnergyInput& in, std::span<const double> zeta) {
  return energy_shifted(in, zeta, 0.0);
}

EnergyGradient energy_shifted(const EnergyInput& in, std::span<const double> zeta, double m) {
  check_input(in, zeta);
  check_has_keys(in);
  base::require(std::isfinite(m), "m = {}; accepted: a finite number", m);
  OnlineSoftmax sum(in.v_dim);
  for (std::int64_t a = 0; a < in.keys; ++a) sum.add(logit(in, zeta, a), row_of(in.v, a, in.v_dim));
  EnergyGradient result{sum.energy_shifted_by(m), std::vector<double>(index(in.v_dim))};
  sum.mean(result.gradient);
  return result;
}

Moments moments(const EnergyInput& in, std::span<const double> zeta) {
  check_input(in, zeta);
  check_has_keys(in);
  const std::vector<double> p = probabilities(in, zeta);
  const std::size_t dim = index(in.v_dim);
  Moments out{std::vector<double>(dim), std::vector<double>(dim * dim), std::vector<double>(dim * dim)};
  for (std::int64_t a = 0; a < in.keys; ++a) {
    const auto v = row_of(in.v, a, in.v_dim);
    for (std::size_t i = 0; i < dim; ++i) out.mean[i] += p[index(a)] * v[i];
  }
  std::vector<double> centred(dim), rest(dim);  // the mean of v - mean: what rounding left of it
  for (std::int64_t a = 0; a < in.keys; ++a) {
    const auto v = row_of(in.v, a, in.v_dim);
    for (std::size_t i = 0; i < dim; ++i) centred[i] = v[i] - out.mean[i];
    for (std::size_t i = 0; i < dim; ++i) {
      rest[i] += p[index(a)] * centred[i];
      for (std::size_t j = i; j < dim; ++j) {
        out.second[i * dim + j] += p[index(a)] * (v[i] * v[j]);
        out.covariance[i * dim + j] += p[index(a)] * (centred[i] * centred[j]);
      }
    }
  }
  for (std::size_t i = 0; i < dim; ++i) {
    for (std::size_t j = i; j < dim; ++j) out.covariance[i * dim + j] -= rest[i] * rest[j];
    for (std::size_t j = 0; j < i; ++j) {
      out.second[i * dim + j] = out.second[j * dim + i];
      out.covariance[i * dim + j] = out.covariance[j * dim + i];
    }
  }
  return out;
}

double moment(const EnergyInput& in, std::span<const std::int64_t> indices) {
  check_input(in, {});
  check_has_keys(in);
  base::require_address("indices", indices);
  for (const std::int64_t i : indices) {
    base::require(i >= 0 && i < in.v_dim, "moment index = {}; accepted: 0 to {}", i, in.v_dim - 1);
  }
  if (indices.empty()) return 1.0;  // the P_a sum to 1, but not to the last bit
  const std::vector<double> p = probabilities(in, {});
  double sum = 0.0;
  for (std::int64_t a = 0; a < in.keys; ++a) {
    double product = p[index(a)];
    for (const std::int64_t i : indices) product *= in.v[index(a * in.v_dim + i)];
    sum += product;
  }
  return sum;
}

}  // namespace treeattn
