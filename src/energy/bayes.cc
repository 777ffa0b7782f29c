// SPDX-License-Identifier: Apache-2.0
// Attention as a MAP estimate: the stationary point of Gamma(zeta, z) = z . zeta - F_tot(zeta).
#include <algorithm>
#include <cmath>
#include <utility>

#include "energy/checks.h"
#include "energy/softmax.h"
#include "treeattn/energy.h"

namespace treeattn {

using namespace energy_internal;

namespace {

// Scaled by the largest element, so that the squares neither overflow nor vanish.
double norm(std::span<const double> x) {
  double largest = 0.0;
  for (const double x_i : x) {
    if (std::isnan(x_i)) return x_i;  // max() would pass over it, and a row of NaN look like one of zeros
    largest = std::max(largest, std::abs(x_i));
  }
  if (largest == 0.0) return 0.0;
  double sum = 0.0;
  for (const double x_i : x) sum += (x_i / largest) * (x_i / largest);
  return largest * std::sqrt(sum);
}

}  // namespace

LogLikelihood log_likelihood(const CausalEnergyInput& in, std::span<const double> zeta, std::span<const double> z) {
  check_input(in, zeta);
  check_size("z", z, in.heads * in.queries, in.v_dim);
  check_finite("z", z);
  const EnergyGradient f = causal_energy_and_gradient(in, zeta);
  LogLikelihood result;
  result.value = (zeta.empty() ? 0.0 : dot(z, zeta)) - f.energy;
  result.grad_zeta.resize(z.size());
  for (std::size_t i = 0; i < z.size(); ++i) result.grad_zeta[i] = z[i] - f.gradient[i];
  result.grad_z.assign(z.size(), 0.0);
  std::copy(zeta.begin(), zeta.end(), result.grad_z.begin());
  return result;
}

MapEstimate map_estimate(const CausalEnergyInput& in) {
  // In closed form: dGamma/dz = zeta = 0, and then dGamma/dzeta = z - dF/dzeta = 0 is attention. Nothing to iterate.
  EnergyGradient f = causal_energy_and_gradient(in);
  return {std::vector<double>(f.gradient.size(), 0.0), std::move(f.gradient), -f.energy};
}

Stationarity stationarity(const CausalEnergyInput& in, const MapEstimate& point) {
  const LogLikelihood gamma = log_likelihood(in, point.zeta, point.z);
  return {norm(gamma.grad_zeta), norm(gamma.grad_z)};
}

}  // namespace treeattn
