// SPDX-License-Identifier: Apache-2.0
// The energy whose gradient is attention, its higher derivatives, and its reading as a MAP estimate.
//
//   F(zeta) = log sum_a exp(scale * q . k_a + zeta . v_a),      attention = dF/dzeta at zeta = 0.
//
// This is where the theory can be run, and an oracle for the rest: double precision, plain loops, one thread, natural
// log. Nothing here is fast and nothing on the way of a token calls it. docs/energy.md maps each function to its
// equation.
//
//   treeattn::EnergyInput in{.q = q, .k = k, .v = v, .keys = keys, .head_dim = 64, .v_dim = 64, .scale = 0.125};
//   std::vector<double> z = treeattn::energy_and_gradient(in).gradient;
//
// Every function is pure and thread-safe, and throws InvalidArgument, naming the value and what is accepted, when a
// size does not match, a dimension is below 1, a number is not finite or a logit overflows double. Sums and products of
// v that overflow are not looked for; they show as inf or NaN. A source `zeta` that is an empty span is zero and is
// never materialised. The views must outlive the call, not longer.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace treeattn {

// One query and its keys. keys may be 0: then F is -inf, and what needs a mean throws InvalidArgument.
struct EnergyInput {
  std::span<const double> q{};  // [head_dim]
  std::span<const double> k{};  // [keys, head_dim]
  std::span<const double> v{};  // [keys, v_dim]
  std::int64_t keys = 0;
  std::int64_t head_dim = 0;
  std::int64_t v_dim = 0;
  double scale = 1.0;  // the paper's is 1
};

// F and dF/dzeta; at zeta = 0 the gradient is attention.
struct EnergyGradient {
  double energy = 0.0;
  std::vector<double> gradient;  // [v_dim]; causal: [heads, queries, v_dim]
};

// F(zeta), one pass over the keys. -inf without keys.
double energy(const EnergyInput& in, std::span<const double> zeta = {});

// F(zeta) and its gradient, one pass over the keys. Requires keys >= 1.
EnergyGradient energy_and_gradient(const EnergyInput& in, std::span<const double> zeta = {});

// Safe softmax: the same of F'(zeta) = log sum_a exp(scale * q . k_a + zeta . v_a - m) = F(zeta) - m. The gradient is
// that of F, bit for bit and for any finite m, because m is a constant here: not a function of zeta, even where it was
// computed as one. Requires keys >= 1, and that F' fits in double.
EnergyGradient energy_shifted(const EnergyInput& in, std::span<const double> zeta, double m);

// ---- The paper's algorithms, over `chunks` processors played one after another ----
// The keys are cut into `chunks` runs of equal length, give or take one; with more chunks than keys some are empty.
// chunks >= 1, or InvalidArgument.

// What Algorithm 1 saves. lse is that of the logits after the shift by m, so it lies in [0, log keys] and the energy is
// the sum of the two. Without keys both are -inf.
struct EnergyForward {
  double lse = 0.0;
  double m = 0.0;  // the largest logit
  double energy() const { return m + lse; }
};

// Algorithm 1: reduce max by a tree, shift, reduce logsumexp by a tree.
EnergyForward energy_forward(const EnergyInput& in, std::span<const double> zeta, int chunks);

// Algorithm 2: m and lse from Algorithm 1, then the sum of exp(q . k_a - m - lse) v_a by a tree. Requires keys >= 1.
EnergyGradient tree_decode_algorithm2(const EnergyInput& in, int chunks);

// Algorithm 3: attention and lse of each chunk, then max of lse, sum of numerators and sum of denominators, each by a
// tree, and one division. Requires keys >= 1.
EnergyGradient tree_decode_algorithm3(const EnergyInput& in, int chunks);

// ---- Moments of v under the attention distribution P_a = exp(logit_a - F) ----

struct Moments {
  std::vector<double> mean;        // [v_dim]         <v_A>      = (1/Z) dZ/dzeta_A            = dF/dzeta_A
  std::vector<double> second;      // [v_dim, v_dim]  <v_A v_B>  = (1/Z) d2Z/dzeta_A dzeta_B
  std::vector<double> covariance;  // [v_dim, v_dim]  second - mean mean^T                     = d2F/dzeta_A dzeta_B
};

// The first two Taylor coefficients of Z and the curvature of F, around zeta. Both matrices are symmetric bit for bit.
// The covariance is summed from v - mean, and what rounding left of the mean there is taken out again, so it does not
// lose its digits when the mean is large. Requires keys >= 1.
Moments moments(const EnergyInput& in, std::span<const double> zeta = {});

// <v_A1 ... v_An> = (1/Z) d^nZ/dzeta_A1 ... dzeta_An at zeta = 0, for indices (A1 ... An) in [0, v_dim), in any order,
// repeats allowed; no indices give 1. Requires keys >= 1.
double moment(const EnergyInput& in, std::span<const std::int64_t> indices);

// ---- Causal self-attention ----

// Query i of a head sees keys 0 to i of that head. queries may be 0: then F_tot is 0 and there is no gradient.
struct CausalEnergyInput {
  std::span<const double> q{};  // [heads, queries, head_dim]
  std::span<const double> k{};  // [heads, queries, head_dim]
  std::span<const double> v{};  // [heads, queries, v_dim]
  std::int64_t queries = 0;
  std::int64_t head_dim = 0;
  std::int64_t v_dim = 0;
  double scale = 1.0;
  std::int64_t heads = 1;
};

// F_tot(zeta) = sum_h sum_i F_{i,h}, F_{i,h} = log sum_{a <= i} exp(scale * q_{i,h} . k_{a,h} + zeta_{i,h} . v_{a,h}),
// and its gradient, in one pass over each query's keys. zeta [heads, queries, v_dim] or empty.
EnergyGradient causal_energy_and_gradient(const CausalEnergyInput& in, std::span<const double> zeta = {});

// F'_tot: the logits of query i and head h are shifted by m[h, i]. m [heads, queries], finite.
EnergyGradient causal_energy_shifted(const CausalEnergyInput& in, std::span<const double> zeta,
                                     std::span<const double> m);

// ---- Bayesian reading ----

// Gamma(zeta, z) = sum_{i,h} (z_{i,h} . zeta_{i,h} - F_{i,h}(zeta_{i,h})) and its gradients.
//
// The paper prints sum_i sum_A (z_{i,A} zeta_{i,A} - F), which read literally subtracts F once per component A. Its
// stationary point would then be z = v_dim * dF/dzeta: v_dim times attention. With F subtracted once per query, Gamma
// is the function under the Legendre transform of F and the stationary point is the one the paper states, so that is
// what this computes.
struct LogLikelihood {
  double value = 0.0;
  std::vector<double> grad_zeta;  // [heads, queries, v_dim]  z - dF/dzeta
  std::vector<double> grad_z;     // [heads, queries, v_dim]  zeta
};

// zeta and z [heads, queries, v_dim]; an empty zeta is zero.
LogLikelihood log_likelihood(const CausalEnergyInput& in, std::span<const double> zeta, std::span<const double> z);

// The stationary point of Gamma: zeta* = 0, z* = attention, Gamma* = -F_tot(0). It is the only one, and a saddle:
// Gamma is concave in zeta and linear in z, so Gamma* = min over z of max over zeta, not an extremum in both.
struct MapEstimate {
  std::vector<double> zeta;  // [heads, queries, v_dim] zeros
  std::vector<double> z;     // [heads, queries, v_dim]
  double value = 0.0;
};
MapEstimate map_estimate(const CausalEnergyInput& in);

// The Euclidean norms of both gradients of Gamma at a point; both are 0 exactly at the MAP estimate.
struct Stationarity {
  double zeta_norm = 0.0;
  double z_norm = 0.0;
};
Stationarity stationarity(const CausalEnergyInput& in, const MapEstimate& point);

}  // namespace treeattn
