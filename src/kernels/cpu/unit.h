// SPDX-License-Identifier: Apache-2.0
// What one worker handles together, and which keys it sees.
#pragma once

#include <cstdint>

#include "kernels/problem.h"

namespace treeattn::kernels {

// What is worked on together: the rows of some queries of one sequence, for some KV heads. Each key row is read once
// for all query rows that share its head. Row order: (head, query, query head in the group).
struct Unit {
  std::int64_t batch = 0;
  std::int64_t head0 = 0;
  std::int64_t heads = 0;  // KV heads
  std::int64_t query0 = 0;
  std::int64_t queries = 0;

  bool operator==(const Unit&) const = default;
  std::int64_t rows_per_head(const Problem& p) const { return queries * p.group(); }
  std::int64_t rows(const Problem& p) const { return heads * rows_per_head(p); }
  // The keys that any query of the unit sees.
  KeyRange visible(const Problem& p) const;
  // The keys that every query of the unit sees.
  KeyRange visible_to_all(const Problem& p) const;
  // Index of a row of the unit among all rows [batch, queries, heads].
  std::int64_t global_row(const Problem& p, std::int64_t row) const;
};

// The part of the unit's keys that lies in chunk `chunk` of the canonical order, as local key indices.
KeyRange keys_in_chunk(const Problem& problem, const KeyRange& visible, std::int64_t chunk);

}  // namespace treeattn::kernels
