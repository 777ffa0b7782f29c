// SPDX-License-Identifier: Apache-2.0
// F_tot of causal self-attention, over queries and heads, and its gradient.
#include "energy/checks.h"
#include "energy/softmax.h"
#include "treeattn/energy.h"

namespace treeattn {

using namespace energy_internal;

namespace {

// The keys that query `query` of head `head` sees, as one row.
EnergyInput visible_row(const CausalEnergyInput& in, std::int64_t head, std::int64_t query) {
  const std::int64_t first = head * in.queries;
  const std::int64_t keys = query + 1;
  EnergyInput row;
  row.q = row_of(in.q, first + query, in.head_dim);
  row.k = in.k.subspan(index(first * in.head_dim), index(keys * in.head_dim));
  row.v = in.v.subspan(index(first * in.v_dim), index(keys * in.v_dim));
  row.keys = keys;
  row.head_dim = in.head_dim;
  row.v_dim = in.v_dim;
  row.scale = in.scale;
  return row;
}

// shift is [heads, queries] or empty for none. Everything is checked.
EnergyGradient causal_rows(const CausalEnergyInput& in, std::span<const double> zeta, std::span<const double> shift) {
  const std::int64_t rows = in.heads * in.queries;
  if (rows == 0) return {};  // no array says then that v_dim is a size that memory has room for
  EnergyGradient result{0.0, std::vector<double>(index(rows * in.v_dim))};
  OnlineSoftmax sum(in.v_dim);
  for (std::int64_t i = 0; i < rows; ++i) {
    const EnergyInput row = visible_row(in, i / in.queries, i % in.queries);
    const auto source = zeta.empty() ? zeta : row_of(zeta, i, in.v_dim);
    const double m = shift.empty() ? 0.0 : shift[index(i)];
    sum.reset();
    for (std::int64_t a = 0; a < row.keys; ++a) sum.add(logit(row, source, a), row_of(row.v, a, in.v_dim));
    result.energy += sum.energy_shifted_by(m);
    sum.mean(std::span(result.gradient).subspan(index(i * in.v_dim), index(in.v_dim)));
  }
  return result;
}

}  // namespace

EnergyGradient causal_energy_and_gradient(const CausalEnergyInput& in, std::span<const double> zeta) {
  check_input(in, zeta);
  return causal_rows(in, zeta, {});
}

EnergyGradient causal_energy_shifted(const CausalEnergyInput& in, std::span<const double> zeta,
                                     std::span<const double> m) {
  check_input(in, zeta);
  check_size("m", m, in.heads * in.queries, 1);
  check_finite("m", m);
  return causal_rows(in, zeta, m);
}

}  // namespace treeattn
