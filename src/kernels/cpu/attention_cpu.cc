// SPDX-License-Identifier: Apache-2.0
// Attention on the CPU: cut into units and leaves, spread over the pool, merged in the canonical order.
//
// The work is units x leaves. Where there are units enough for the pool (prefill, batches), a task is a unit; where not
// (decode of one sequence), a task is a few neighbouring leaves of one unit. Either way a leaf's state depends only on
// its keys, and the leaves of a unit are merged along the same tree, so the bits do not depend on the pool.
#include <algorithm>
#include <bit>
#include <memory>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "base/round_up.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/leaf.h"
#include "merge/rows.h"
#include "treeattn/state.h"

namespace treeattn::kernels {
namespace {

// Rows that share a KV head and are worked on together: their sums must stay in the nearest caches. A long prompt takes
// more at a time where the second level holds them, as each block of rows reads and packs all of K and V.
constexpr std::int64_t kRowsPerHead = 128;
#if defined(__x86_64__)
constexpr std::int64_t kMostRowsPerHead = 256;
#else
constexpr std::int64_t kMostRowsPerHead = kRowsPerHead;
#endif
constexpr std::int64_t kManyBlocks = 8;  // from so many of them on
constexpr std::int64_t kRowsPerUnit = kMaxRowsPerCall;
constexpr std::int64_t kRowsOfHeadsApart = 2;  // the same where each head lies by itself (docs/cpu_notes.md)
constexpr std::int64_t kRowsPerMerge = 4;      // one task of the merge that ends a decode
// Tasks per thread that make dynamic scheduling even.
constexpr std::int64_t kTasksPerThread = 4;
// The same where one sequence is all the work, so that a thread held up by others costs little.
constexpr int kSubtreesPerThread = 16;

struct Work {
  std::vector<Unit> units;
  std::int64_t max_heads = 1;
  std::int64_t max_rows = 1;
  std::int64_t leaves = 1;  // most leaves a unit can have that are not empty
  bool task_per_unit = false;
};

// The leaves of the tree, among those asked for, that hold keys of the unit, ascending.
std::vector<int> used_leaves(const Problem& problem, const Unit& unit) {
  const KeyRange visible = unit.visible(problem);
  std::vector<int> used;
  if (visible.empty()) return used;
  const ReductionOrder& order = problem.order;
  const std::int64_t first = plan::chunk_of(order, problem.first_key + visible.begin);
  const std::int64_t last = plan::chunk_of(order, problem.first_key + visible.end - 1);
  if (last - first < order.branches) {
    for (std::int64_t c = first; c <= last; ++c) {
      const int leaf = plan::leaf_of_chunk(order, c);
      if (plan::contains(problem.nodes, leaf)) used.push_back(leaf);
    }
    std::sort(used.begin(), used.end());
    used.erase(std::unique(used.begin(), used.end()), used.end());
    return used;
  }
  for (const plan::TreeNode& node : problem.nodes) {
    for (int leaf = node.first_leaf(); leaf < node.last_leaf(); ++leaf) {
      if (plan::first_chunk(order, leaf, first) <= last) used.push_back(leaf);
    }
  }
  return used;
}

Work plan_work(const Problem& problem, int threads) {
  Work work;
  const std::int64_t group = problem.group();
  const bool many = problem.q.queries * group >= kManyBlocks * kMostRowsPerHead;
  const std::int64_t queries =
      std::clamp<std::int64_t>((many ? kMostRowsPerHead : kRowsPerHead) / group, 1, problem.q.queries);
  const std::int64_t head_rows = queries * group;
  // Several heads together where their rows lie side by side: then a token's heads are one sequential read.
  const bool side_by_side = problem.k.head_stride <= problem.k.token_stride;
  const std::int64_t unit_rows = side_by_side ? kRowsPerUnit : kRowsOfHeadsApart;
  std::int64_t heads =
      head_rows < kPromoteFromRows ? std::clamp<std::int64_t>(unit_rows / head_rows, 1, problem.k.kv_heads) : 1;
  const std::int64_t blocks = base::divide_up(problem.q.queries, queries);
  const std::int64_t longest = *std::max_element(problem.lengths.begin(), problem.lengths.end());
  const std::int64_t chunks = longest / problem.order.chunk_tokens + 2;
  std::int64_t asked = 0;
  for (const plan::TreeNode& node : problem.nodes) asked += node.last_leaf() - node.first_leaf();
  work.leaves = std::max<std::int64_t>(1, std::min(chunks, asked));

  // How heads are grouped changes no bits: every head is computed by itself.
  const auto units_with = [&](std::int64_t h) {
    return problem.q.batch * blocks * base::divide_up(problem.k.kv_heads, h);
  };
  const std::int64_t wanted = kTasksPerThread * threads;
  while (heads > 1 && units_with(heads) * work.leaves < wanted) heads = base::divide_up(heads, 2);
  // Prefill and batches: one task per unit keeps only a thread's own leaves in memory.
  work.task_per_unit = threads == 1 || units_with(heads) >= wanted || blocks > 1;

  // Last queries first: under a causal mask they see the most keys, and the short tasks fill the end.
  for (std::int64_t block = blocks - 1; block >= 0; --block) {
    for (std::int64_t b = 0; b < problem.q.batch; ++b) {
      for (std::int64_t h = 0; h < problem.k.kv_heads; h += heads) {
        const std::int64_t query0 = block * queries;
        work.units.push_back(
            {b, h, std::min(heads, problem.k.kv_heads - h), query0, std::min(queries, problem.q.queries - query0)});
      }
    }
  }
  work.max_heads = heads;
  work.max_rows = heads * head_rows;
  return work;
}

// The level of the lowest node above two different leaves.
int meeting_level(int a, int b) { return std::bit_width(static_cast<unsigned>(a ^ b)); }

// Merges states of the leaves of one node along the canonical tree with a stack: push(i) puts the state of leaves[i] on
// top, merge(depth) merges the top, at `depth`, into the one below it. Two neighbours merge as soon as no later leaf
// belongs between them. Leaves left out are identities, which change nothing. The root ends at depth 0.
template <class Push, class Merge>
void fold_leaves(std::span<const int> leaves, const Push& push, const Merge& merge) {
  std::vector<int> stack;
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    push(i, stack.size());
    stack.push_back(leaves[i]);
    while (stack.size() >= 2) {
      const int top = stack.back();
      const bool last = i + 1 == leaves.size();
      if (!last && meeting_level(stack[stack.size() - 2], top) > meeting_level(top, leaves[i + 1])) break;
      merge(stack.size() - 1);
      stack.pop_back();
    }
  }
}

// Calls body(node, the used leaves inside it) for every node of the problem.
template <class Body>
void for_each_node(const Problem& problem, std::span<const int> used, const Body& body) {
  auto begin = used.begin();
  for (std::size_t n = 0; n < problem.nodes.size(); ++n) {
    const auto end = std::lower_bound(begin, used.end(), problem.nodes[n].last_leaf());
    body(n, std::span<const int>(begin, end));
    begin = end;
  }
}

// Puts rows [first, last) of a unit, from `from` on, where they belong in the states of node n. Null: identities.
void store_rows(const Problem& problem, const Unit& unit, std::size_t n, std::int64_t first, std::int64_t last,
                const float* from, float* states) {
  const std::size_t row_floats = state_floats(problem.v.head_dim);
  float* node_states = states + n * static_cast<std::size_t>(problem.rows()) * row_floats;
  for (std::int64_t r = first; r < last; ++r) {
    float* to = node_states + static_cast<std::size_t>(unit.global_row(problem, r)) * row_floats;
    if (from == nullptr) {
      merge::clear_rows(to, 1, row_floats);
    } else {
      std::copy_n(from + static_cast<std::size_t>(r - first) * row_floats, row_floats, to);
    }
  }
}

// Everything one call of attention_states_on shares between its tasks.
class Run {
 public:
  Run(const CpuTarget& target, const Problem& problem, float* states, ThreadPool& pool)
      : target_(target),
        problem_(problem),
        states_(states),
        pool_(pool),
        work_(plan_work(problem, pool.size())),
        row_floats_(state_floats(problem.v.head_dim)),
        unit_floats_(static_cast<std::size_t>(work_.max_rows) * row_floats_),
        workers_(static_cast<std::size_t>(pool.size())),
        stacks_(static_cast<std::size_t>(pool.size())) {}

  void run() { work_.task_per_unit ? unit_by_unit() : subtree_by_subtree(); }

 private:
  LeafWorker& worker_of(int thread) {
    auto& worker = workers_[static_cast<std::size_t>(thread)];
    if (!worker) worker = std::make_unique<LeafWorker>(target_, problem_, work_.max_heads, work_.max_rows);
    return *worker;
  }

  // Computes leaves of a node and merges them as it goes. at(depth) is room for states; the result is at(0).
  template <class At>
  void fold_leaves_of(LeafWorker& worker, std::span<const int> leaves, std::size_t rows, const At& at) {
    fold_leaves(
        leaves, [&](std::size_t i, std::size_t d) { worker.leaf(leaves[i], at(d)); },
        [&](std::size_t d) { merge::merge_rows(at(d - 1), at(d), rows, row_floats_); });
  }

  // A thread's room for the states that wait while leaves are merged: log2(leaves) + 2 are enough.
  float* stack_of(int thread, int levels) {
    base::Buffer& stack = stacks_[static_cast<std::size_t>(thread)];
    if (stack.bytes() == 0) stack = base::Buffer(static_cast<std::size_t>(levels + 2) * unit_floats_ * sizeof(float));
    return stack.as<float>();
  }

  // A task computes all leaves of a unit.
  void unit_by_unit() {
    const int levels = plan::log2_exact(problem_.order.branches);
    pool_.run(work_.units.size(), [&](std::size_t task, int thread) {
      float* stack = stack_of(thread, levels);
      const auto at = [&](std::size_t d) { return stack + d * unit_floats_; };
      const Unit& unit = work_.units[task];
      const std::size_t rows = static_cast<std::size_t>(unit.rows(problem_));
      LeafWorker& worker = worker_of(thread);
      worker.begin_unit(unit);
      for_each_node(problem_, used_leaves(problem_, unit), [&](std::size_t n, std::span<const int> leaves) {
        fold_leaves_of(worker, leaves, rows, at);
        store_rows(problem_, unit, n, 0, unit.rows(problem_), leaves.empty() ? nullptr : at(0), states_);
      });
    });
  }

  // The leaves of a unit that lie below one node of the tree.
  struct Subtree {
    std::size_t unit;
    std::span<const int> leaves;
  };

  // How many levels a subtree has. Merging leaves while they are in the nearest caches, and keeping few states, wants
  // large subtrees; threads that end at the same time want many. None reaches beyond a node that is asked for.
  int subtree_levels(std::size_t leaves) const {
    int levels = plan::log2_exact(problem_.order.branches);
    for (const plan::TreeNode& node : problem_.nodes) {
      levels = std::min(levels, plan::log2_exact(node.last_leaf() - node.first_leaf()));
    }
    const std::size_t wanted = static_cast<std::size_t>(kSubtreesPerThread * pool_.size());
    while (levels > 0 && leaves >> levels < wanted) --levels;
    return levels;
  }

  // A task computes a subtree of a unit; then the rows of all subtrees are merged, a few to a task.
  void subtree_by_subtree() {
    std::vector<std::vector<int>> used;
    std::size_t all = 0;
    for (const Unit& unit : work_.units) all += used.emplace_back(used_leaves(problem_, unit)).size();
    const int levels = subtree_levels(all);
    std::vector<Subtree> subtrees;
    std::vector<std::size_t> first_subtree;      // of a unit
    std::vector<std::vector<int>> first_leaves;  // of the subtrees of a unit, which stand for them in the tree
    for (std::size_t u = 0; u < used.size(); ++u) {
      first_subtree.push_back(subtrees.size());
      first_leaves.emplace_back();
      for (auto begin = used[u].begin(); begin != used[u].end();) {
        const int node = *begin >> levels;
        const auto end = std::find_if(begin, used[u].end(), [&](int leaf) { return leaf >> levels != node; });
        subtrees.push_back({u, {begin, end}});
        first_leaves.back().push_back(*begin);
        begin = end;
      }
    }
    base::Buffer subtree_states(subtrees.size() * unit_floats_ * sizeof(float));
    const auto state_of = [&](std::size_t subtree) { return subtree_states.as<float>() + subtree * unit_floats_; };
    pool_.run(subtrees.size(), [&](std::size_t task, int thread) {
      const Unit& unit = work_.units[subtrees[task].unit];
      float* stack = stack_of(thread, levels);
      LeafWorker& worker = worker_of(thread);
      worker.begin_unit(unit);
      fold_leaves_of(worker, subtrees[task].leaves, static_cast<std::size_t>(unit.rows(problem_)),
                     [&](std::size_t d) { return d == 0 ? state_of(task) : stack + d * unit_floats_; });
    });
    const std::size_t parts = static_cast<std::size_t>(base::divide_up(work_.max_rows, kRowsPerMerge));
    pool_.run(work_.units.size() * parts, [&](std::size_t task, int) {
      const std::size_t u = task / parts;
      const std::int64_t first = static_cast<std::int64_t>(task % parts) * kRowsPerMerge;
      const std::int64_t last = std::min(first + kRowsPerMerge, work_.units[u].rows(problem_));
      if (first >= last) return;
      const std::size_t rows = static_cast<std::size_t>(last - first);
      std::size_t subtree0 = first_subtree[u];
      for_each_node(problem_, first_leaves[u], [&](std::size_t n, std::span<const int> leaves) {
        std::vector<float*> stack(leaves.size());
        fold_leaves(
            leaves,
            [&](std::size_t i, std::size_t d) {
              stack[d] = state_of(subtree0 + i) + static_cast<std::size_t>(first) * row_floats_;
            },
            [&](std::size_t d) { merge::merge_rows(stack[d - 1], stack[d], rows, row_floats_); });
        store_rows(problem_, work_.units[u], n, first, last, leaves.empty() ? nullptr : stack[0], states_);
        subtree0 += leaves.size();
      });
    });
  }

  const CpuTarget& target_;
  const Problem& problem_;
  float* states_;
  ThreadPool& pool_;
  const Work work_;
  const std::size_t row_floats_;
  const std::size_t unit_floats_;
  std::vector<std::unique_ptr<LeafWorker>> workers_;
  std::vector<base::Buffer> stacks_;  // by thread
};

}  // namespace

void attention_states_on(const CpuTarget& target, const Problem& problem, float* states, ThreadPool& pool) {
  Run(target, problem, states, pool).run();
}

}  // namespace treeattn::kernels
