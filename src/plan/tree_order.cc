// SPDX-License-Identifier: Apache-2.0
#include "plan/tree_order.h"

#include "base/check.h"

namespace treeattn::plan {

using base::require;

void check_order(const ReductionOrder& order) {
  constexpr std::int64_t kMaxChunkTokens = std::int64_t{1} << 40;
  constexpr std::int64_t kMaxAllTokens = std::int64_t{1} << 62;  // so that no chunk number overflows
  constexpr int kMaxBranches = 65536;
  require(order.chunk_tokens > 0 && order.chunk_tokens % 64 == 0 && order.chunk_tokens <= kMaxChunkTokens,
          "chunk_tokens = {}; accepted: a multiple of 64, 64 to 2^40", order.chunk_tokens);
  const int branches = order.branches;
  require(branches >= 1 && branches <= kMaxBranches && (branches & (branches - 1)) == 0,
          "branches = {}; accepted: a power of two, 1 to {}", branches, kMaxBranches);
  require(order.placement == Placement::kCyclic || order.placement == Placement::kContiguous,
          "placement = {}; accepted: 0 (cyclic), 1 (contiguous)", static_cast<int>(order.placement));
  if (order.placement == Placement::kCyclic) {
    require(order.branch_tokens == 0, "branch_tokens = {} with cyclic placement; accepted: 0", order.branch_tokens);
    return;
  }
  const std::int64_t tokens = order.branch_tokens;
  require(tokens > 0 && tokens % order.chunk_tokens == 0 && tokens <= kMaxAllTokens / branches,
          "branch_tokens = {} with contiguous placement and {} branches; accepted: a multiple of chunk_tokens = {}, at "
          "most {}",
          tokens, branches, order.chunk_tokens, kMaxAllTokens / branches);
}

}  // namespace treeattn::plan
