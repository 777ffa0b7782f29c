// SPDX-License-Identifier: Apache-2.0
#include "parallel/node_states.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/round_up.h"
#include "merge/rows.h"

namespace treeattn::parallel {
namespace {

// Below this the pool costs more than it gives.
constexpr std::size_t kFloatsPerTask = 32768;

}  // namespace

NodeStates::NodeStates(std::size_t rows, std::size_t row_floats, ThreadPool& pool)
    : rows_(rows), row_floats_(row_floats), pool_(&pool) {}

void NodeStates::add(const plan::NodeSet& nodes, const SharedBuffer& memory, std::size_t offset) {
  plan::NodeSet old_nodes = std::exchange(nodes_, {});
  std::vector<Block> old_blocks = std::exchange(blocks_, {});
  const auto append = [&](plan::TreeNode node, Block block) {
    blocks_.push_back(std::move(block));
    plan::append_node(nodes_, node, [&] { merge_last_two(); });
  };
  std::size_t o = 0;
  const auto append_old_before = [&](int leaf) {
    for (; o < old_nodes.size() && old_nodes[o].first_leaf() < leaf; ++o) {
      append(old_nodes[o], std::move(old_blocks[o]));
    }
  };
  float* data = memory->as<float>() + offset;
  for (const plan::TreeNode& node : nodes) {
    append_old_before(node.first_leaf());
    append(node, {data, memory});
    data += block_floats();
  }
  append_old_before(std::numeric_limits<int>::max());
}

void NodeStates::merge_last_two() {
  float* lower = blocks_[blocks_.size() - 2].data;
  const float* higher = blocks_.back().data;
  const std::size_t rows_per_task = std::max<std::size_t>(1, kFloatsPerTask / row_floats_);
  if (rows_ <= 2 * rows_per_task || pool_->size() == 1) {
    merge::merge_rows(lower, higher, rows_, row_floats_);
  } else {
    pool_->run(base::divide_up(rows_, rows_per_task), [&](std::size_t task, int) {
      const std::size_t first = task * rows_per_task;
      const std::size_t count = std::min(rows_per_task, rows_ - first);
      merge::merge_rows(lower + first * row_floats_, higher + first * row_floats_, count, row_floats_);
    });
  }
  blocks_.pop_back();
}

void NodeStates::merge_all() {
  if (blocks_.size() < 2) return;
  std::vector<Block> all = std::exchange(blocks_, {});
  blocks_.push_back(std::move(all[0]));
  for (std::size_t i = 1; i < all.size(); ++i) {
    blocks_.push_back(std::move(all[i]));
    merge_last_two();
  }
  nodes_.resize(1);
}

void NodeStates::pack(float* to) const {
  for (const Block& block : blocks_) to = std::copy_n(block.data, block_floats(), to);
}

StatesView NodeStates::packed() const {
  if (blocks_.size() == 1) return {blocks_[0].data, blocks_[0].owner};
  SharedBuffer all = make_shared_buffer(blocks_.size() * block_floats());
  pack(all->as<float>());
  return {all->as<float>(), all};
}

}  // namespace treeattn::parallel
