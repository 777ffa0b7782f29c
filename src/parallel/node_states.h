// SPDX-License-Identifier: Apache-2.0
// States of some nodes of the canonical tree, growing together towards its root.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/buffer.h"
#include "plan/node_set.h"
#include "treeattn/thread_pool.h"

namespace treeattn::parallel {

using SharedBuffer = std::shared_ptr<base::Buffer>;

inline SharedBuffer make_shared_buffer(std::size_t floats) {
  return std::make_shared<base::Buffer>(floats * sizeof(float));
}

// Blocks one after the other, in memory that `owner` keeps.
struct StatesView {
  const float* data = nullptr;
  SharedBuffer owner;
};

// One block [rows, v_dim + 2] per node. In which order nodes are added does not matter for the bits: siblings merge
// when they are both there, the left one first. Movable.
class NodeStates {
 public:
  NodeStates(std::size_t rows, std::size_t row_floats, ThreadPool& pool);

  std::size_t block_floats() const { return rows_ * row_floats_; }
  const plan::NodeSet& nodes() const { return nodes_; }
  const float* block(std::size_t i) const { return blocks_[i].data; }

  // Adds nodes, none of which is there yet, whose blocks lie one after the other in `memory` from `offset` floats on.
  // The blocks are merged into and out of where they lie: `memory` must not be used for anything else any more.
  void add(const plan::NodeSet& nodes, const SharedBuffer& memory, std::size_t offset = 0);

  // Merges whatever is there into one block, in ascending order: the free order.
  void merge_all();

  // Writes the blocks one after the other.
  void pack(float* to) const;
  // The same without copying where there is one: good until the next change.
  StatesView packed() const;

 private:
  struct Block {
    float* data = nullptr;
    SharedBuffer owner;  // freed when the last block in it has been merged away
  };
  void merge_last_two();

  std::size_t rows_;
  std::size_t row_floats_;
  ThreadPool* pool_;
  plan::NodeSet nodes_;
  std::vector<Block> blocks_;  // [nodes_]
};

}  // namespace treeattn::parallel
