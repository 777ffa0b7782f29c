// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/unit.h"

#include <algorithm>

namespace treeattn::kernels {

KeyRange Unit::visible(const Problem& p) const { return p.visible_to_any(batch, query0, queries); }

KeyRange Unit::visible_to_all(const Problem& p) const {
  KeyRange all = p.visible(batch, query0);
  for (std::int64_t i = 1; i < queries; ++i) {
    const KeyRange one = p.visible(batch, query0 + i);
    all = {std::max(all.begin, one.begin), std::min(all.end, one.end)};
  }
  return all;
}

std::int64_t Unit::global_row(const Problem& p, std::int64_t row) const {
  const std::int64_t group = p.group();
  const std::int64_t head = head0 + row / (queries * group);
  const std::int64_t query = query0 + row / group % queries;
  return (batch * p.q.queries + query) * p.q.heads + head * group + row % group;
}

KeyRange keys_in_chunk(const Problem& problem, const KeyRange& visible, std::int64_t chunk) {
  const std::int64_t begin = chunk * problem.order.chunk_tokens - problem.first_key;
  return {std::max(visible.begin, begin), std::min(visible.end, begin + problem.order.chunk_tokens)};
}

}  // namespace treeattn::kernels
