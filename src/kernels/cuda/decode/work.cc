// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/decode/work.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>

namespace treeattn::kernels::cuda {
namespace {

// Rows of an item: some queries with all heads of a group, or, where a group has too many heads, one query with some.
// The groups of KV heads that share an item are one.
struct RowTile {
  std::int64_t group;
  std::int64_t queries = 1;
  std::int64_t heads = 1;

  RowTile(const Problem& problem, const ItemLimits& limits) : group(limits.kv_heads * problem.group()) {
    heads = std::min<std::int64_t>(group, limits.rows);
    if (group <= limits.rows) queries = std::clamp<std::int64_t>(limits.rows / group, 1, problem.q.queries);
  }
  // How many of them a group of a sequence has.
  std::int64_t count(const Problem& problem) const {
    return ((problem.q.queries + queries - 1) / queries) * ((group + heads - 1) / heads);
  }
};

// Of the cut of a share into parts.
struct CutLimits {
  int leaves;  // with keys, of a part
  int parts;   // if there is no other reason

  // As many parts as are merged at once, of several heads so many of each: their items are fewer. More only where the
  // memory would not be busy with those. copies: items of a part, of all shares together.
  CutLimits(const ItemLimits& limits, std::int64_t copies, int busy)
      : leaves(1 << limits.levels), parts(limits.kv_heads * kMergeAtOnce) {
    while (copies > 0 && parts * copies < busy) parts *= 2;
  }
};

// The part of one sequence that lies below one of the nodes asked for.
class Share {
 public:
  Share(const Problem& problem, std::int64_t batch, int node)
      : batch_(batch), node_(node), first_leaf_(problem.nodes[static_cast<std::size_t>(node)].first_leaf()) {
    const int leaves = problem.nodes[static_cast<std::size_t>(node)].last_leaf() - first_leaf_;
    const KeyRange seen = problem.visible_to_any(batch);
    used_before_.assign(static_cast<std::size_t>(leaves) + 1, 0);
    chunks_before_.assign(static_cast<std::size_t>(leaves) + 1, 0);
    for (int leaf = 0; leaf < leaves; ++leaf) {
      const std::int64_t chunks =
          seen.empty() ? 0
                       : plan::chunks_of_leaf(problem.order, first_leaf_ + leaf,
                                              plan::chunk_of(problem.order, problem.first_key + seen.begin),
                                              plan::chunk_of(problem.order, problem.first_key + seen.end - 1));
      const auto i = static_cast<std::size_t>(leaf);
      used_before_[i + 1] = used_before_[i] + (chunks > 0 ? 1 : 0);
      chunks_before_[i + 1] = chunks_before_[i] + chunks;
    }
  }

  std::int64_t batch() const { return batch_; }
  int node() const { return node_; }
  int first_leaf() const { return first_leaf_; }
  int leaves() const { return static_cast<int>(used_before_.size()) - 1; }
  int used() const { return used_before_.back(); }
  std::int64_t chunks(int part, int parts) const { return between(chunks_before_, part, parts); }

  // Into how many parts, a power of two: no part longer than `most_chunks`, if there is no other reason against it; no
  // part with more leaves that have keys than the limit; hardly any without.
  int parts(std::int64_t most_chunks, const CutLimits& limits) const {
    int parts = 1;
    const int most_parts = std::min({leaves(), used(), limits.parts});
    while (2 * parts <= most_parts && largest(chunks_before_, parts) > most_chunks) parts *= 2;
    while (largest(used_before_, parts) > limits.leaves) parts *= 2;
    return parts;
  }
  std::int64_t longest(int parts) const { return largest(chunks_before_, parts); }

 private:
  template <class T>
  T between(const std::vector<T>& before, int part, int parts) const {
    const int width = leaves() / parts;
    return before[static_cast<std::size_t>((part + 1) * width)] - before[static_cast<std::size_t>(part * width)];
  }
  template <class T>
  T largest(const std::vector<T>& before, int parts) const {
    T most = 0;
    for (int part = 0; part < parts; ++part) most = std::max(most, between(before, part, parts));
    return most;
  }
  std::int64_t batch_;
  int node_, first_leaf_;
  std::vector<int> used_before_;             // leaves with keys before each
  std::vector<std::int64_t> chunks_before_;  // and their chunks
};

// The length of an item, in chunks, that makes the whole shortest. The memory is kept busy by `busy` blocks, however
// many more there are; it is not when the last round has fewer items than that. And in the last round those that happen
// to be faster, by about a tenth, wait for the others. Where every block counts, one round is best: nothing goes on
// while a block begins or ends.
std::int64_t best_length(const std::vector<Share>& shares, std::int64_t copies, const CutLimits& limits, int slots,
                         int busy) {
  constexpr double kPerItem = 0.2;  // what beginning and ending an item costs, in chunks
  constexpr double kInRuns = 1;     // what merging more than kMergeAtOnce items costs
  constexpr double kUneven = 0.1;
  std::int64_t longest = 1;
  for (const Share& share : shares) longest = std::max(longest, share.longest(1));
  std::int64_t best = 1;
  double best_time = std::numeric_limits<double>::infinity();
  for (std::int64_t length = 1; length < 2 * longest; length *= 2) {
    double total = 0;
    std::int64_t items = 0, most = 0;
    int most_parts = 0;
    for (const Share& share : shares) {
      const int parts = share.parts(length, limits);
      items += parts;
      most_parts = std::max(most_parts, parts);
      total += static_cast<double>(share.chunks(0, 1)) + kPerItem * parts;
      most = std::max(most, share.longest(parts));
    }
    const std::int64_t last_round = items * copies % slots;
    double waiting = kUneven * slots / busy;
    if (busy == slots) waiting = items * copies > slots ? 0.5 : 0.0;
    if (last_round > 0 && last_round < busy) waiting += 1.0 - static_cast<double>(last_round) / busy;
    const double time = total * static_cast<double>(copies) / busy + waiting * static_cast<double>(most) +
                        (most_parts > kMergeAtOnce ? kInRuns : 0.0);
    if (time <= best_time) {
      best = length;
      best_time = time;
    }
  }
  return best;
}

// The grid that the items are, if they are one.
ItemGrid grid_of(const std::vector<WorkItem>& items, std::int64_t kv_heads, int head_step) {
  const std::int64_t heads = kv_heads / head_step;
  if (items.empty() || !std::has_single_bit(static_cast<std::uint64_t>(heads))) return {};
  const WorkItem& first = items.front();
  ItemGrid grid;
  grid.head_bits = plan::log2_exact(static_cast<int>(heads));
  grid.head_step = head_step;
  grid.queries = first.queries;
  grid.heads = first.heads;
  grid.first_leaf = first.first_leaf;
  const auto numbers = [](const WorkItem& item) {
    return std::array{item.batch,      item.kv_head, item.query0, item.queries,     item.head0,      item.heads,
                      item.first_leaf, item.leaves,  item.node,   item.group_items, item.group_slot, item.place};
  };
  for (std::size_t i = 0; i < items.size(); ++i) {
    const auto number = static_cast<std::int32_t>(i);
    if (i == 0 || items[i].leaves != items[i - 1].leaves) {
      if (grid.count == ItemGrid::kRuns) return {};
      grid.runs[grid.count++] = {number, items[i].batch, plan::log2_exact(items[i].group_items), items[i].leaves};
    }
    if (numbers(items[i]) != numbers(grid.item(number))) return {};
  }
  return grid;
}

}  // namespace

Work split_work(const Problem& problem, ItemLimits limits, int slots, int busy) {
  const RowTile tile(problem, limits);
  std::vector<Share> shares;
  for (std::size_t n = 0; n < problem.nodes.size(); ++n) {
    for (std::int64_t b = 0; b < problem.q.batch; ++b) shares.emplace_back(problem, b, static_cast<int>(n));
  }
  const std::int64_t copies = problem.k.kv_heads / limits.kv_heads * tile.count(problem);
  const CutLimits cut(limits, copies * static_cast<std::int64_t>(shares.size()), busy);
  const std::int64_t length = best_length(shares, copies, cut, slots, busy);

  // Where not all items run at the same time, those of the last sequences are shorter and shorter: none of them takes
  // longer than what is left of the whole, so that all blocks end at about the same time.
  std::int64_t items = 0, left = 0;
  for (const Share& share : shares) {
    items += copies * share.parts(length, cut);
    left += copies * share.chunks(0, 1);
  }
  const auto length_now = [&] {
    return items <= slots ? length : std::min(length, std::max<std::int64_t>(1, left / slots));
  };

  Work work;
  for (const Share& share : shares) {
    const int parts = share.parts(length_now(), cut);
    left -= copies * share.chunks(0, 1);
    const int width = share.leaves() / parts;
    for (std::int64_t q = 0; q < problem.q.queries; q += tile.queries) {
      for (std::int64_t h0 = 0; h0 < tile.group; h0 += tile.heads) {
        for (std::int64_t h = 0; h < problem.k.kv_heads; h += limits.kv_heads) {
          const auto slot = static_cast<std::int32_t>(work.items.size());
          for (int part = 0; part < parts; ++part) {
            WorkItem item;
            item.batch = static_cast<std::int32_t>(share.batch());
            item.kv_head = static_cast<std::int32_t>(h);
            item.query0 = static_cast<std::int32_t>(q);
            item.queries = static_cast<std::int32_t>(std::min(tile.queries, problem.q.queries - q));
            item.head0 = static_cast<std::int32_t>(h0);
            item.heads = static_cast<std::int32_t>(std::min(tile.heads, tile.group - h0));
            item.first_leaf = share.first_leaf() + part * width;
            item.leaves = width;
            item.chunks = static_cast<std::int32_t>(std::min<std::int64_t>(share.chunks(part, parts), 1 << 30));
            item.node = share.node();
            item.group_items = parts;
            item.group_slot = slot;
            item.place = part;
            work.rows_per_item = std::max(work.rows_per_item, item.rows());
            work.items.push_back(item);
          }
        }
      }
    }
  }
  // The longest first, so that short ones fill the end, if not all of them run at the same time. Of equal ones those of
  // the same keys next to each other: heads that share rows of a page are read at the same time.
  const bool one_round = work.items.size() <= static_cast<std::size_t>(slots);
  std::stable_sort(work.items.begin(), work.items.end(), [&](const WorkItem& a, const WorkItem& b) {
    if (a.chunks != b.chunks && !one_round) return a.chunks > b.chunks;
    if (a.batch != b.batch) return a.batch < b.batch;
    return a.first_leaf < b.first_leaf;
  });
  work.counters = work.items.size();
  work.grid = grid_of(work.items, problem.k.kv_heads, limits.kv_heads);
  work.workspace_bytes = work.items.size() * static_cast<std::size_t>(work.rows_per_item) * sizeof(float) *
                         static_cast<std::size_t>(row_state_floats(static_cast<int>(problem.v.head_dim)));
  return work;
}

bool begin_with(const Problem& problem, const Work& work, int tokens) {
  if (work.grid.count == 0 || problem.first_key != 0 || tokens > problem.order.chunk_tokens) return false;
  return std::all_of(work.items.begin(), work.items.end(), [&](const WorkItem& item) {
    const std::int64_t chunk = plan::first_chunk(problem.order, item.first_leaf, 0);
    const KeyRange seen = problem.visible_to_any(item.batch);
    return chunk != plan::kNoChunk && seen.begin == 0 && chunk <= seen.end / problem.order.chunk_tokens &&
           chunk * problem.order.chunk_tokens + tokens <= seen.end;
  });
}

}  // namespace treeattn::kernels::cuda
