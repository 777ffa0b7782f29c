// SPDX-License-Identifier: Apache-2.0
// NodeStates (node_states.h) on a GPU: merges are noted and done all at once.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/cuda/ranks/state_kernels.h"
#include "plan/node_set.h"

namespace treeattn::parallel {

class DeviceNodes {
 public:
  DeviceNodes(kernels::cuda::RowShape shape, cudaStream_t stream) : shape_(shape), stream_(stream) {}

  void add(const plan::NodeSet& nodes, float* data) {
    std::vector<std::pair<plan::TreeNode, float*>> all;
    for (std::size_t i = 0; i < nodes_.size(); ++i) all.emplace_back(nodes_[i], blocks_[i]);
    for (const plan::TreeNode& node : nodes) {
      all.emplace_back(node, data);
      data += shape_.floats();
    }
    std::ranges::sort(all, {}, [](const auto& one) { return one.first.first_leaf(); });
    nodes_.clear();
    blocks_.clear();
    for (const auto& [node, block] : all) {
      blocks_.push_back(block);
      plan::append_node(nodes_, node, [&] { merge_last_two(); });
    }
  }
  void merge_all() {
    std::vector<float*> all = std::exchange(blocks_, {});
    for (float* block : all) {
      blocks_.push_back(block);
      if (blocks_.size() > 1) merge_last_two();
    }
    nodes_.resize(std::min<std::size_t>(nodes_.size(), 1));
  }
  const plan::NodeSet& nodes() const { return nodes_; }
  // The blocks as they are on the stream from now on.
  const std::vector<float*>& blocks() {
    kernels::cuda::merge_blocks(steps_, shape_, stream_);
    steps_.clear();
    return blocks_;
  }

 private:
  void merge_last_two() {
    const float* higher = blocks_.back();
    blocks_.pop_back();
    steps_.push_back({blocks_.back(), higher});
  }

  kernels::cuda::RowShape shape_;
  cudaStream_t stream_;
  plan::NodeSet nodes_;
  std::vector<float*> blocks_;
  std::vector<kernels::cuda::MergeStep> steps_;
};

}  // namespace treeattn::parallel
