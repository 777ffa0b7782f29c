// SPDX-License-Identifier: Apache-2.0
// The mergeable state of attention over a set of keys, as packed rows of floats.
//
// A row is [m_log2, l, o[0] ... o[v_dim - 1]]: the largest logit in log2 units, the sum of 2^(logit - m_log2), and the
// unnormalised sum of 2^(logit - m_log2) * v. Rows of disjoint key sets merge into the row of their union. The
// identity, the state of no keys, is (-inf, 0, 0 ...).
//
// Where what a function requires does not hold it throws InvalidArgument, and has written nothing. All are thread-safe
// on memory of their own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace treeattn {

// Floats of one packed row: v_dim + 2.
constexpr std::size_t state_floats(std::int64_t v_dim) { return static_cast<std::size_t>(v_dim) + 2; }

// Makes every row the identity. Requires states.size() to be a multiple of state_floats(v_dim).
void identity_states(std::span<float> states, std::int64_t v_dim);

// lower[i] = merge(lower[i], higher[i]), row by row. The order matters for the bits, not for the value: pass the state
// that comes first in the reduction tree as `lower`. Requires equal sizes, a multiple of state_floats(v_dim), and
// memory of its own for each.
void merge_states(std::span<float> lower, std::span<const float> higher, std::int64_t v_dim);

// out [rows, v_dim] = o / l and, unless empty, lse [rows] = ln(2) * m_log2 + ln(l). The identity gives (0, -inf).
// sinks, unless empty, holds `heads` logits (natural units); row r gets sinks[r % heads]. -inf is none; with NaN or
// +inf the row is NaN. One of size above 2^127 may be infinite in log2 units. `out` and `lse` may not overlap each
// other, states or sinks. Requires these sizes, and rows a multiple of heads.
void finalize_states(std::span<const float> states, std::int64_t v_dim, std::span<const float> sinks,
                     std::span<float> out, std::span<float> lse);

}  // namespace treeattn
