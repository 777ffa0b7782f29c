// SPDX-License-Identifier: Apache-2.0
// The checks of checks.h.
#include "energy/checks.h"

#include <cmath>
#include <cstddef>
#include <limits>

#include "base/check.h"

namespace treeattn::energy_internal {
namespace {

void check_dims(std::int64_t head_dim, std::int64_t v_dim, double scale) {
  base::require(head_dim >= 1, "head_dim = {}; accepted: 1 or more", head_dim);
  base::require(v_dim >= 1, "v_dim = {}; accepted: 1 or more", v_dim);
  base::require(std::isfinite(scale), "scale = {}; accepted: a finite number", scale);
}

}  // namespace

void check_finite(std::string_view name, std::span<const double> values) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    base::require(std::isfinite(values[i]), "{}[{}] = {}; accepted: finite numbers", name, i, values[i]);
  }
}

void check_size(std::string_view name, std::span<const double> values, std::int64_t rows, std::int64_t width) {
  // By division, because rows * width may overflow where the caller's sizes are wrong.
  const auto size = static_cast<std::int64_t>(values.size());
  base::require(size % width == 0 && size / width == rows, "{} has {} elements; accepted: {} * {}", name, size, rows,
                width);
  base::require_address(name, values);
}

void check_input(const EnergyInput& in, std::span<const double> zeta) {
  check_dims(in.head_dim, in.v_dim, in.scale);
  base::require(in.keys >= 0, "keys = {}; accepted: 0 or more", in.keys);
  check_size("q", in.q, 1, in.head_dim);
  check_size("k", in.k, in.keys, in.head_dim);
  check_size("v", in.v, in.keys, in.v_dim);
  if (!zeta.empty()) check_size("zeta", zeta, 1, in.v_dim);
  check_finite("q", in.q);
  check_finite("k", in.k);
  check_finite("v", in.v);
  check_finite("zeta", zeta);
}

void check_input(const CausalEnergyInput& in, std::span<const double> zeta) {
  check_dims(in.head_dim, in.v_dim, in.scale);
  base::require(in.heads >= 1, "heads = {}; accepted: 1 or more", in.heads);
  // The upper bound keeps heads * queries, the rows of every array below, inside 64 bits.
  base::require(in.queries >= 0 && in.queries <= std::numeric_limits<std::int64_t>::max() / in.heads,
                "queries = {} with {} heads; accepted: 0 or more, heads * queries below 2^63", in.queries, in.heads);
  const std::int64_t rows = in.heads * in.queries;
  check_size("q", in.q, rows, in.head_dim);
  check_size("k", in.k, rows, in.head_dim);
  check_size("v", in.v, rows, in.v_dim);
  if (!zeta.empty()) check_size("zeta", zeta, rows, in.v_dim);
  check_finite("q", in.q);
  check_finite("k", in.k);
  check_finite("v", in.v);
  check_finite("zeta", zeta);
}

void check_has_keys(const EnergyInput& in) {
  base::require(in.keys >= 1, "keys = {}; accepted: 1 or more, for a mean over no keys does not exist", in.keys);
}

void check_chunks(int chunks) { base::require(chunks >= 1, "chunks = {}; accepted: 1 or more", chunks); }

}  // namespace treeattn::energy_internal
