// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/work.h"

#include <algorithm>

namespace treeattn::kernels::cuda {
namespace {

// Rows of an item: some queries with all heads of a group, or, where a group has too many heads, one query with some.
struct RowTile {
  std::int64_t queries = 1;
  std::int64_t heads = 1;
};

RowTile row_tile(const Problem& problem, int most_rows) {
  const std::int64_t group = problem.group();
  if (group > most_rows) return {1, most_rows};
  return {std::clamp<std::int64_t>(most_rows / group, 1, problem.q.queries), group};
}

// Blocks come in waves of `slots`; a wave lasts as long as the leaves that one of the four warps of a block works
// through, plus something for beginning and ending a block. Of equal times the fewer, larger blocks.
int leaves_per_item(const Problem& problem, KernelLimits limits, std::int64_t blocks, std::int64_t leaves,
                    std::int64_t slots) {
  constexpr std::int64_t kWarps = 4;
  const std::int64_t longest = *std::max_element(problem.lengths.begin(), problem.lengths.end());
  const std::int64_t chunks = std::max<std::int64_t>(1, longest / problem.order.chunk_tokens);
  const double used = std::min(1.0, static_cast<double>(chunks) / problem.order.branches);
  const double leaf_chunks = std::max(1.0, static_cast<double>(chunks) / problem.order.branches);
  int best = limits.leaves;
  double best_time = 0;
  for (int candidate = limits.leaves; candidate >= 1; candidate /= 2) {
    const std::int64_t items = std::max<std::int64_t>(1, blocks * leaves / candidate);
    const double waves = static_cast<double>((items + slots - 1) / slots);
    const double of_warp = std::max(1.0, static_cast<double>(std::max<std::int64_t>(1, candidate / kWarps)) * used);
    const double time = waves * (of_warp * leaf_chunks + 0.5);
    if (best_time == 0 || time < best_time) {
      best = candidate;
      best_time = time;
    }
  }
  return best;
}

}  // namespace

Work split_work(const Problem& problem, KernelLimits limits, int slots) {
  const RowTile tile = row_tile(problem, limits.rows);
  const std::int64_t group = problem.group();
  const std::int64_t blocks = problem.q.batch * problem.k.kv_heads *
                              ((problem.q.queries + tile.queries - 1) / tile.queries) *
                              ((group + tile.heads - 1) / tile.heads);
  std::int64_t leaves = 0;
  for (const plan::TreeNode& node : problem.nodes) leaves += node.last_leaf() - node.first_leaf();
  const int per_item = leaves_per_item(problem, limits, blocks, leaves, slots);

  Work work;
  for (std::size_t n = 0; n < problem.nodes.size(); ++n) {
    const plan::TreeNode& node = problem.nodes[n];
    const int width = std::min(per_item, node.last_leaf() - node.first_leaf());
    const int parts = (node.last_leaf() - node.first_leaf()) / width;
    for (std::int64_t b = 0; b < problem.q.batch; ++b) {
      for (std::int64_t q = 0; q < problem.q.queries; q += tile.queries) {
        for (std::int64_t h0 = 0; h0 < group; h0 += tile.heads) {
          for (std::int64_t h = 0; h < problem.k.kv_heads; ++h) {
            const auto id = static_cast<std::int32_t>(work.groups.size());
            work.groups.push_back({static_cast<std::int32_t>(work.items.size()), parts, static_cast<std::int32_t>(n)});
            for (int part = 0; part < parts; ++part) {
              WorkItem item;
              item.batch = static_cast<std::int32_t>(b);
              item.kv_head = static_cast<std::int32_t>(h);
              item.query0 = static_cast<std::int32_t>(q);
              item.queries = static_cast<std::int32_t>(std::min(tile.queries, problem.q.queries - q));
              item.head0 = static_cast<std::int32_t>(h0);
              item.heads = static_cast<std::int32_t>(std::min(tile.heads, group - h0));
              item.first_leaf = node.first_leaf() + part * width;
              item.leaves = width;
              item.group = id;
              item.place = part;
              work.rows_per_item = std::max(work.rows_per_item, item.rows());
              work.items.push_back(item);
            }
          }
        }
      }
    }
  }
  // Items of one part of the sequence next to each other: heads that share rows of a page are read at the same time.
  // Longest sequences first, so that the short ones fill the end.
  std::stable_sort(work.items.begin(), work.items.end(), [&](const WorkItem& a, const WorkItem& b) {
    const auto length = [&](const WorkItem& item) { return problem.lengths[static_cast<std::size_t>(item.batch)]; };
    if (length(a) != length(b)) return length(a) > length(b);
    return a.first_leaf < b.first_leaf;
  });
  return work;
}

}  // namespace treeattn::kernels::cuda
