// SPDX-License-Identifier: Apache-2.0
// How a decode call is cut into items for a GPU. These are numbers, and need none.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/cuda/decode/work.h"
#include "kernels/problem.h"

namespace treeattn::kernels::cuda {
namespace {

struct Call {
  std::int64_t heads = 32, kv_heads = 8, queries = 1, tokens = 65536;
  std::vector<std::int64_t> lengths = {65536};
  int branches = 256;
  std::int64_t window = 0;
  plan::NodeSet nodes = {};  // empty: the whole tree

  Problem problem() const {
    alignas(16) static float nothing[4];  // never looked at
    const auto batch = static_cast<std::int64_t>(lengths.size());
    AttentionInput in;
    in.q = QueryView::dense(nothing, DType::kFloat32, batch, queries, heads, 64);
    in.k = in.v = KvView::heads_first(nothing, DType::kFloat32, batch, tokens, kv_heads, 64);
    in.lengths = lengths;
    in.order.branches = branches;
    AttentionOptions options;
    options.causal = window > 0;
    options.window = window;
    return make_problem(in, options, nodes.empty() ? nullptr : &nodes);
  }
};

int used_leaves(const Problem& problem, const WorkItem& item) {
  const KeyRange seen = problem.visible_to_any(item.batch);
  if (seen.empty()) return 0;
  int used = 0;
  for (int leaf = item.first_leaf; leaf < item.first_leaf + item.leaves; ++leaf) {
    const std::int64_t chunks =
        plan::chunks_of_leaf(problem.order, leaf, plan::chunk_of(problem.order, problem.first_key + seen.begin),
                             plan::chunk_of(problem.order, problem.first_key + seen.end - 1));
    used += chunks > 0 ? 1 : 0;
  }
  return used;
}

int largest_group(const Work& work) {
  int most = 0;
  for (const WorkItem& item : work.items) most = std::max(most, item.group_items);
  return most;
}

// Every row meets every leaf of every node once, in groups that can be merged along the tree.
void expect_complete(const Problem& problem, const Work& work, const ItemLimits& limits) {
  std::map<int, std::vector<WorkItem>> groups;
  std::set<int> slots;
  for (const WorkItem& item : work.items) {
    groups[item.group_slot].push_back(item);
    EXPECT_TRUE(slots.insert(item.group_slot + item.place).second);
    EXPECT_LE(item.rows(), limits.rows);
    EXPECT_LE(item.rows(), work.rows_per_item);
    EXPECT_LE(used_leaves(problem, item), 1 << limits.levels);
  }
  EXPECT_EQ(work.items.size(), work.counters);
  ASSERT_FALSE(slots.empty());
  EXPECT_EQ(*slots.rbegin() + 1, static_cast<int>(work.items.size()));

  std::set<std::tuple<int, int, int, int>> rows;  // node, sequence, query, head
  for (auto& [group, items] : groups) {
    std::sort(items.begin(), items.end(), [](const WorkItem& a, const WorkItem& b) { return a.place < b.place; });
    const WorkItem& first = items.front();
    ASSERT_EQ(first.group_items, static_cast<int>(items.size()));
    EXPECT_TRUE(std::has_single_bit(items.size()));
    const plan::TreeNode& node = problem.nodes[static_cast<std::size_t>(first.node)];
    int leaf = node.first_leaf();
    for (const WorkItem& item : items) {
      EXPECT_EQ(item.first_leaf, leaf);
      EXPECT_EQ(item.leaves, first.leaves);
      EXPECT_EQ(item.group_slot, first.group_slot);
      EXPECT_EQ(
          std::tie(item.node, item.batch, item.kv_head, item.query0, item.queries, item.head0, item.heads),
          std::tie(first.node, first.batch, first.kv_head, first.query0, first.queries, first.head0, first.heads));
      leaf += item.leaves;
    }
    EXPECT_EQ(leaf, node.last_leaf());
    for (int q = 0; q < first.queries; ++q) {
      for (int h = 0; h < first.heads; ++h) {
        const int head = first.kv_head * static_cast<int>(problem.group()) + first.head0 + h;
        EXPECT_TRUE(rows.insert({first.node, first.batch, first.query0 + q, head}).second);
      }
    }
  }
  EXPECT_EQ(rows.size(), problem.nodes.size() * static_cast<std::size_t>(problem.rows()));
}

TEST(GpuWork, EveryRowMeetsEveryLeafOnce) {
  std::mt19937 engine(1);
  const auto pick = [&]<class T>(const std::vector<T>& list) { return list[engine() % list.size()]; };
  for (int number = 0; number < 1000; ++number) {
    Call call;
    call.kv_heads = pick(std::vector{1, 2, 3, 8});
    call.heads = call.kv_heads * pick(std::vector{1, 4, 5, 16, 20});
    call.queries = pick(std::vector{1, 3});
    call.lengths.assign(pick(std::vector<std::size_t>{1, 2, 5}), 0);
    for (std::int64_t& length : call.lengths) length = pick(std::vector{0, 1, 300, 20000, 65536});
    call.window = pick(std::vector{0, 700});
    call.branches = pick(std::vector{1, 32, 1024});
    if (call.branches >= 32) call.nodes = pick(std::vector<plan::NodeSet>{{}, {{3, 1}, {0, 16}}});
    const int heads = call.kv_heads % 2 == 0 ? pick(std::vector{1, 2}) : 1;
    const ItemLimits limits{pick(std::vector{2, 8, 16}), pick(std::vector{0, 3, 4}), heads};
    const auto [slots, busy] = pick(std::vector<std::pair<int, int>>{{264, 198}, {132, 99}, {1, 1}});
    SCOPED_TRACE("number " + std::to_string(number));
    const Problem problem = call.problem();
    expect_complete(problem, split_work(problem, limits, slots, busy), limits);
    if (HasFailure()) return;
  }
}

// Where there is a grid, it has the items of the list.
TEST(GpuWork, GridIsTheList) {
  int grids = 0;
  for (const std::int64_t kv_heads : {1, 8, 6}) {
    for (const std::int64_t tokens : {300, 65536, 1 << 20}) {
      Call call{4 * kv_heads, kv_heads, 1, tokens, {tokens, tokens}, 256, 0, {}};
      const Work work = split_work(call.problem(), {8, 3, 1}, 264, 198);
      if (work.grid.count == 0) continue;
      ++grids;
      for (std::size_t i = 0; i < work.items.size(); ++i) {
        const WorkItem item = work.grid.item(static_cast<std::int32_t>(i));
        EXPECT_EQ(item.first_leaf, work.items[i].first_leaf);
        EXPECT_EQ(item.group_slot, work.items[i].group_slot);
        EXPECT_EQ(item.kv_head, work.items[i].kv_head);
      }
    }
  }
  EXPECT_GT(grids, 0);
}

// One merge of a group where that many items keep the memory busy, and more items where they would not.
TEST(GpuWork, GroupsAreAsLargeAsTheMemoryNeeds) {
  constexpr int kSlots = 132, kBusy = 99;
  const auto split = [&](std::int64_t kv_heads, std::int64_t tokens, std::size_t sequences) {
    const Call call{16 * kv_heads, kv_heads, 1, tokens, std::vector<std::int64_t>(sequences, tokens), 256, 0, {}};
    return split_work(call.problem(), {16, 3, 1}, kSlots, kBusy);
  };
  const Work many = split(8, 1 << 18, 1);
  EXPECT_EQ(largest_group(many), kMergeAtOnce);
  const Work batch = split(1, 1 << 18, 8);
  EXPECT_EQ(largest_group(batch), kMergeAtOnce);
  const Work one = split(1, 1 << 20, 1);
  EXPECT_GE(one.items.size(), static_cast<std::size_t>(kBusy));
  EXPECT_GT(largest_group(one), kMergeAtOnce);
  // Not for the sake of a few keys.
  EXPECT_LE(largest_group(split(1, 2048, 1)), kMergeAtOnce);
}

// A rank may carry no node at all.
TEST(GpuWork, NothingToDo) {
  Problem problem = Call().problem();
  problem.nodes.clear();
  const Work work = split_work(problem, {8, 3, 1}, 264, 198);
  EXPECT_TRUE(work.items.empty());
  EXPECT_EQ(work.counters, 0u);
  EXPECT_EQ(work.grid.count, 0);
}

}  // namespace
}  // namespace treeattn::kernels::cuda
