// SPDX-License-Identifier: Apache-2.0
// Attention on the CPU: cut into units and leaves, spread over the pool, merged in the canonical order.
//
// The work is units x leaves. Where there are units enough for the pool (prefill, batches), a task is a unit; where not
// (decode of one sequence), a task is one leaf of one unit. Either way a leaf's state depends only on its keys, and the
// leaves of a unit are merged along the same tree, so the bits do not depend on the pool.
#include <algorithm>
#include <memory>
#include <vector>

#include "base/buffer.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/leaf.h"
#include "merge/rows.h"
#include "treeattn/state.h"

namespace treeattn::kernels {
namespace {

// Rows that share a KV head and are worked on together: their sums must stay in the nearest caches.
constexpr std::int64_t kRowsPerHead = 128;
constexpr std::int64_t kRowsPerUnit = kMaxRowsPerCall;
constexpr std::int64_t kRowsPerMerge = 4;  // one task of the merge that ends a decode
// Tasks per thread that make dynamic scheduling even.
constexpr std::int64_t kTasksPerThread = 4;

struct Work {
  std::vector<Unit> units;
  std::int64_t max_heads = 1;
  std::int64_t max_rows = 1;
  std::int64_t leaves = 1;  // most leaves a unit can have that are not empty
  bool task_per_unit = false;
};

// The leaves of the tree that hold keys of the unit, in the order of the tree.
std::vector<int> used_leaves(const Problem& problem, const Unit& unit) {
  const KeyRange visible = unit.visible(problem);
  std::vector<int> used;
  if (visible.empty()) return used;
  const std::int64_t first = problem.order.chunk_of(problem.first_key + visible.begin);
  const std::int64_t last = problem.order.chunk_of(problem.first_key + visible.end - 1);
  const std::int64_t chunks = std::min<std::int64_t>(last - first + 1, problem.order.branches);
  for (std::int64_t c = first; c < first + chunks; ++c) {
    used.push_back(plan::branch_of_leaf(problem.order.branch_of_chunk(c), problem.order.branches));
  }
  std::sort(used.begin(), used.end());
  return used;
}

Work plan_work(const Problem& problem, int threads) {
  Work work;
  const std::int64_t group = problem.group();
  const std::int64_t queries = std::clamp<std::int64_t>(kRowsPerHead / group, 1, problem.q.queries);
  const std::int64_t head_rows = queries * group;
  // Several heads together where their rows lie side by side: then a token's heads are one sequential read.
  const bool side_by_side = problem.k.head_stride <= problem.k.token_stride && head_rows < kPromoteFromRows;
  std::int64_t heads = side_by_side ? std::clamp<std::int64_t>(kRowsPerUnit / head_rows, 1, problem.k.kv_heads) : 1;
  const std::int64_t blocks = (problem.q.queries + queries - 1) / queries;
  const std::int64_t longest = *std::max_element(problem.lengths.begin(), problem.lengths.end());
  const std::int64_t chunks = longest / problem.order.chunk_tokens + 2;
  work.leaves = std::min<std::int64_t>(chunks, problem.order.branches);

  // How heads are grouped changes no bits: every head is computed by itself.
  const auto units_with = [&](std::int64_t h) { return problem.q.batch * blocks * ((problem.k.kv_heads + h - 1) / h); };
  const std::int64_t wanted = kTasksPerThread * threads;
  while (heads > 1 && units_with(heads) * work.leaves < wanted) heads = (heads + 1) / 2;
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

// Rows [first, last) of a unit: merges the leaves' states along the canonical tree and puts the root where it belongs.
// states holds one block [unit rows] per entry of `leaf`; missing leaves are identities, which change nothing.
void merge_leaves(const Problem& problem, const Unit& unit, std::vector<int> leaf, float* states, std::int64_t first,
                  std::int64_t last, float* out) {
  const std::size_t row_floats = state_floats(problem.v.head_dim);
  const std::size_t block = static_cast<std::size_t>(unit.rows(problem)) * row_floats;
  const std::size_t rows = static_cast<std::size_t>(last - first);
  std::vector<float*> node(leaf.size());
  for (std::size_t i = 0; i < leaf.size(); ++i) {
    node[i] = states + i * block + static_cast<std::size_t>(first) * row_floats;
  }
  for (int width = 1; width < problem.order.branches; width *= 2) {
    // Nodes of this level that are siblings become one node of the next.
    std::size_t kept = 0;
    for (std::size_t i = 0; i < leaf.size(); ++i) {
      const int parent = leaf[i] / 2;
      if (kept > 0 && leaf[kept - 1] == parent) {
        merge::merge_rows(node[kept - 1], node[i], rows, row_floats);
      } else {
        leaf[kept] = parent;
        node[kept++] = node[i];
      }
    }
    leaf.resize(kept);
    node.resize(kept);
  }
  for (std::int64_t r = first; r < last; ++r) {
    float* to = out + static_cast<std::size_t>(unit.global_row(problem, r)) * row_floats;
    if (node.empty()) {
      merge::clear_rows(to, 1, row_floats);
    } else {
      const float* root = node[0] + static_cast<std::size_t>(r - first) * row_floats;
      std::copy(root, root + row_floats, to);
    }
  }
}

}  // namespace

void attention_states_on(const CpuTarget& target, const Problem& problem, float* states, ThreadPool& pool) {
  const std::size_t row_floats = state_floats(problem.v.head_dim);
  const Work work = plan_work(problem, pool.size());
  const std::size_t unit_floats = static_cast<std::size_t>(work.max_rows) * row_floats;
  const std::size_t slots = static_cast<std::size_t>(work.leaves);

  std::vector<std::unique_ptr<LeafWorker>> workers(static_cast<std::size_t>(pool.size()));
  const auto worker_of = [&](int thread) -> LeafWorker& {
    auto& worker = workers[static_cast<std::size_t>(thread)];
    if (!worker) worker = std::make_unique<LeafWorker>(target, problem, work.max_heads, work.max_rows);
    return *worker;
  };
  const auto branch_of = [&](int leaf) { return plan::branch_of_leaf(leaf, problem.order.branches); };

  if (work.task_per_unit) {
    std::vector<base::Buffer> leaf_states(static_cast<std::size_t>(pool.size()));
    pool.run(work.units.size(), [&](std::size_t task, int thread) {
      base::Buffer& buffer = leaf_states[static_cast<std::size_t>(thread)];
      if (buffer.bytes() == 0) buffer = base::Buffer(slots * unit_floats * sizeof(float));
      const Unit& unit = work.units[task];
      const std::vector<int> used = used_leaves(problem, unit);
      const std::size_t stride = static_cast<std::size_t>(unit.rows(problem)) * row_floats;
      LeafWorker& worker = worker_of(thread);
      worker.begin_unit(unit);
      for (std::size_t i = 0; i < used.size(); ++i) worker.leaf(branch_of(used[i]), buffer.as<float>() + i * stride);
      merge_leaves(problem, unit, used, buffer.as<float>(), 0, unit.rows(problem), states);
    });
    return;
  }

  base::Buffer leaf_states(work.units.size() * slots * unit_floats * sizeof(float));
  std::vector<std::vector<int>> used;
  for (const Unit& unit : work.units) used.push_back(used_leaves(problem, unit));
  const auto unit_states = [&](std::size_t unit) { return leaf_states.as<float>() + unit * slots * unit_floats; };
  pool.run(work.units.size() * slots, [&](std::size_t task, int thread) {
    const std::size_t u = task / slots;
    const std::size_t slot = task % slots;
    if (slot >= used[u].size()) return;
    LeafWorker& worker = worker_of(thread);
    worker.begin_unit(work.units[u]);
    const std::size_t stride = static_cast<std::size_t>(work.units[u].rows(problem)) * row_floats;
    worker.leaf(branch_of(used[u][slot]), unit_states(u) + slot * stride);
  });
  const std::size_t parts = static_cast<std::size_t>((work.max_rows + kRowsPerMerge - 1) / kRowsPerMerge);
  pool.run(work.units.size() * parts, [&](std::size_t task, int) {
    const std::size_t u = task / parts;
    const std::int64_t first = static_cast<std::int64_t>(task % parts) * kRowsPerMerge;
    const std::int64_t last = std::min(first + kRowsPerMerge, work.units[u].rows(problem));
    if (first < last) merge_leaves(problem, work.units[u], used[u], unit_states(u), first, last, states);
  });
}

}  // namespace treeattn::kernels
