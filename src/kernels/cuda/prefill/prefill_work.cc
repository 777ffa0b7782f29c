// SPDX-License-Identifier: Apache-2.0
// How a call with many queries is cut: every head's queries in blocks, each over a whole node.
#include <algorithm>

#include "kernels/cuda/decode/work.h"

namespace treeattn::kernels::cuda {
namespace {

// Chunks that some of the queries see, of the whole sequence, whatever the node.
std::int64_t chunks_seen(const Problem& problem, std::int64_t batch, std::int64_t first, std::int64_t count) {
  KeyRange seen;
  for (std::int64_t q = first; q < first + count; ++q) {
    const KeyRange more = problem.visible(batch, q);
    if (more.empty()) continue;
    seen = seen.empty() ? more : KeyRange{std::min(seen.begin, more.begin), std::max(seen.end, more.end)};
  }
  if (seen.empty()) return 0;
  return plan::chunk_of(problem.order, problem.first_key + seen.end - 1) -
         plan::chunk_of(problem.order, problem.first_key + seen.begin) + 1;
}

// The longest first, so that short ones fill the end. Where the longest is short against what a block has to do in
// all, KV head by KV head, so that what is worked on at the same time stays in the cache of the GPU.
void put_in_order(std::vector<WorkItem>& items, std::size_t blocks) {
  constexpr std::int64_t kShort = 6;
  std::int64_t longest = 0, all = 0;
  for (const WorkItem& item : items) {
    longest = std::max<std::int64_t>(longest, item.chunks);
    all += item.chunks;
  }
  const bool by_heads = kShort * longest * static_cast<std::int64_t>(blocks) <= all;
  std::stable_sort(items.begin(), items.end(), [&](const WorkItem& a, const WorkItem& b) {
    if (by_heads && a.batch != b.batch) return a.batch < b.batch;
    if (by_heads && a.kv_head != b.kv_head) return a.kv_head < b.kv_head;
    return a.chunks > b.chunks;
  });
}

}  // namespace

Work split_prefill(const Problem& problem, int slots) {
  Work work;
  work.rows_per_item = kPrefillRows;
  std::int64_t most_chunks = 0;
  for (std::int64_t b = 0; b < problem.q.batch; ++b) {
    for (std::int64_t q = 0; q < problem.q.queries; q += kPrefillRows) {
      WorkItem item;
      item.batch = static_cast<std::int32_t>(b);
      item.query0 = static_cast<std::int32_t>(q);
      item.queries = static_cast<std::int32_t>(std::min<std::int64_t>(kPrefillRows, problem.q.queries - q));
      item.heads = 1;
      const std::int64_t chunks = chunks_seen(problem, b, q, item.queries);
      most_chunks = std::max(most_chunks, chunks);
      item.chunks = static_cast<std::int32_t>(std::min<std::int64_t>(chunks, 1 << 30));
      for (std::size_t n = 0; n < problem.nodes.size(); ++n) {
        item.first_leaf = problem.nodes[n].first_leaf();
        item.leaves = problem.nodes[n].last_leaf() - item.first_leaf;
        item.node = static_cast<std::int32_t>(n);
        for (std::int64_t h = 0; h < problem.q.heads; ++h) {
          item.kv_head = static_cast<std::int32_t>(h / problem.group());
          item.head0 = static_cast<std::int32_t>(h % problem.group());
          work.items.push_back(item);
        }
      }
    }
  }
  for (std::size_t n = 0; n < problem.nodes.size(); ++n) {
    work.waiting_levels = std::max(work.waiting_levels, problem.nodes[n].level);
  }
  const std::size_t blocks = std::min(work.items.size(), static_cast<std::size_t>(slots));
  put_in_order(work.items, blocks);
  // A state waits for the next at every level of the node, and no more wait than there are leaves with keys.
  work.waiting_levels = static_cast<int>(std::min<std::int64_t>(work.waiting_levels, most_chunks));
  const int columns = kernel_columns(static_cast<int>(std::max(problem.k.head_dim, problem.v.head_dim)));
  const auto state_bytes = static_cast<std::size_t>(waiting_floats(columns)) * sizeof(float);
  work.bad_rows_bytes = work.items.size() * (kPrefillRows / 8) * sizeof(unsigned);  // a multiple of 64
  work.workspace_bytes = work.bad_rows_bytes + blocks * static_cast<std::size_t>(work.waiting_levels) * state_bytes;
  work.counters = 2;
  return work;
}

}  // namespace treeattn::kernels::cuda
