// SPDX-License-Identifier: Apache-2.0
// Checkpoints that are random numbers: the bytes of a model whose weights are not at hand.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <new>

#include "base/half.h"
#include "base/mix.h"
#include "base/round_up.h"
#include "base/virtual_memory.h"
#include "model/checkpoint.h"
#include "model/json.h"
#include "model/tensor_list.h"
#include "treeattn/error.h"
#include "treeattn/thread_pool.h"

namespace treeattn::model {
namespace {

constexpr double kDeviation = 0.02;      // what Llama's weights begin their training with
constexpr std::size_t kBlock = 1 << 16;  // elements: one task, one stream of random numbers
constexpr std::size_t kAlignment = 64;

// The sum of four uniform numbers: near enough to normal here, and one draw is enough.
std::uint16_t random_weight(std::uint64_t bits) {
  const auto sum =
      static_cast<std::int64_t>((bits & 0xffff) + ((bits >> 16) & 0xffff) + ((bits >> 32) & 0xffff) + (bits >> 48));
  constexpr float kScale = static_cast<float>(kDeviation * 1.7320508075688772 / 65536);  // the sum's is 2^16 / sqrt 3
  return base::float_to_bfloat16(static_cast<float>(sum - 2 * 65535) * kScale);
}

class RandomCheckpoint : public Checkpoint {
 public:
  RandomCheckpoint(const LlamaConfig& config, std::uint64_t seed)
      : list_(tensor_list(config)), seed_(seed), made_(list_.size()) {
    std::size_t bytes = 0, blocks = 0;
    for (const NamedShape& tensor : list_) {
      begins_.push_back(bytes);
      first_block_.push_back(blocks);
      blocks += blocks_of(begins_.size() - 1);
      bytes += static_cast<std::size_t>(tensor.elements()) * sizeof(std::uint16_t);
      bytes = base::round_up(bytes, kAlignment);
    }
    try {
      memory_ = base::VirtualMemory(bytes);
      memory_.grow(bytes);
    } catch (const std::bad_alloc&) {
      throw Unavailable(fmt::format("random weights of this shape take {:.1f} GB of memory, more than can be had here",
                                    static_cast<double>(bytes) * 1e-9));
    }
    for (std::size_t i = 0; i < list_.size(); ++i) index_.emplace(list_[i].name, i);
  }

  Tensor tensor(const std::string& name, std::span<const std::int64_t> shape) const override {
    const auto found = index_.find(name);
    if (found == index_.end()) {
      throw BadFile(fmt::format("random weights: no tensor {} of shape {}", shown(name), shape));
    }
    const NamedShape& entry = list_[found->second];
    if (!std::equal(shape.begin(), shape.end(), entry.shape.begin(), entry.shape.end())) {
      throw BadFile(fmt::format("random weights: {} has the shape {}; accepted: {}", name, entry.shape, shape));
    }
    make(found->second);
    return {memory_.data() + begins_[found->second], DType::kBFloat16, entry.shape};
  }

  // A model that is quantised, or goes to a GPU, may be larger than the host's memory.
  void release(const std::string& name) const override {
    const std::size_t tensor = index_.at(name);
    memory_.discard(begins_[tensor], elements(tensor) * sizeof(std::uint16_t));
    made_[tensor] = false;
  }

 private:
  void make(std::size_t tensor) const {
    if (made_[tensor]) return;
    const std::size_t blocks = blocks_of(tensor);
    ThreadPool pool(blocks < 16 ? 1 : ThreadPool::available_cores());
    pool.run(blocks, [&](std::size_t block, int) {
      make_block(tensor, block * kBlock, base::mix(base::mix(seed_ + 1) + first_block_[tensor] + block));
    });
    made_[tensor] = true;
  }

  void make_block(std::size_t tensor, std::size_t first, std::uint64_t stream) const {
    auto* out = reinterpret_cast<std::uint16_t*>(memory_.data() + begins_[tensor]) + first;
    const std::size_t count = std::min(kBlock, elements(tensor) - first);
    if (list_[tensor].shape.size() == 1) {  // a norm's weight
      std::fill_n(out, count, base::float_to_bfloat16(1.0f));
      return;
    }
    for (std::size_t i = 0; i < count; ++i) out[i] = random_weight(base::mix(stream + (i + 1) * 0x9e3779b97f4a7c15u));
  }

  std::size_t elements(std::size_t tensor) const { return static_cast<std::size_t>(list_[tensor].elements()); }

  std::size_t blocks_of(std::size_t tensor) const { return base::divide_up(elements(tensor), kBlock); }

  std::vector<NamedShape> list_;
  std::uint64_t seed_;
  std::vector<std::size_t> begins_;  // in bytes
  std::vector<std::size_t> first_block_;
  std::map<std::string, std::size_t> index_;
  mutable std::vector<bool> made_;  // when first asked for
  mutable base::VirtualMemory memory_;
};

}  // namespace

std::unique_ptr<Checkpoint> random_checkpoint(const LlamaConfig& config, std::uint64_t seed) {
  return std::make_unique<RandomCheckpoint>(config, seed);
}

}  // namespace treeattn::model
