// SPDX-License-Identifier: Apache-2.0
// Small models with random weights, made by the test.
#pragma once

#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/half.h"
#include "kernels/model_ops.h"
#include "model/checkpoint.h"
#include "model/llama.h"
#include "model/weights.h"
#include "thinning.h"
#include "treeattn/thread_pool.h"

namespace treeattn::testing_model {

// Tensors of the size asked for, as trained ones would be: hidden states stay of order 1, and attention has something
// to choose.
class RandomCheckpoint : public model::Checkpoint {
 public:
  RandomCheckpoint(std::uint32_t seed, DType dtype) : seed_(seed), dtype_(dtype) {}

  model::Tensor tensor(const std::string& name, std::span<const std::int64_t> shape) const override {
    std::vector<std::byte>& bytes = tensors_[name];
    std::size_t count = 1;
    for (const std::int64_t n : shape) count *= static_cast<std::size_t>(n);
    if (bytes.empty()) {
      bytes.resize(count * dtype_size(dtype_));
      std::seed_seq seeds{seed_, static_cast<std::uint32_t>(std::hash<std::string>()(name))};
      std::mt19937 random(seeds);
      const bool norm = shape.size() == 1;
      const float scale = norm ? 0.2f : 1.5f / std::sqrt(static_cast<float>(shape.back()));
      std::normal_distribution<float> normal;
      for (std::size_t i = 0; i < count; ++i) {
        const float value = (norm ? 1.0f : 0.0f) + scale * normal(random);
        base::store_from_float(bytes.data() + i * dtype_size(dtype_), value, dtype_);
      }
    }
    return {bytes.data(), dtype_, {shape.begin(), shape.end()}};
  }

 private:
  std::uint32_t seed_;
  DType dtype_;
  mutable std::map<std::string, std::vector<std::byte>> tensors_;
};

inline model::LlamaConfig small_config() {
  model::LlamaConfig c;
  c.vocab = 301;
  c.hidden = 96;
  c.layers = thinning() > 1 ? 2 : 3;
  c.heads = 6;
  c.kv_heads = 2;
  c.head_dim = 16;
  c.feed_forward = 160;
  c.context = 4096;
  c.rope_theta = 10000;
  return c;
}

// The smallest chunks there are, so that a short text is spread over many ranks.
inline LlamaOptions small_options() {
  LlamaOptions options;
  options.order = {64, 16};
  options.attention.strategy = Strategy::kMerge;
  options.chunks_per_piece = 1;
  return options;
}

struct SmallModel {
  explicit SmallModel(model::LlamaConfig config = small_config(), DType dtype = DType::kBFloat16,
                      WeightFormat format = WeightFormat::kAsStored, std::uint32_t seed = 1)
      : pool(1), ops(kernels::cpu_model_ops(pool)) {
    model::WeightOptions options;
    options.format = format;
    weights =
        std::make_shared<model::Weights>(config, std::make_shared<RandomCheckpoint>(seed, dtype), *ops, pool, options);
  }

  ThreadPool pool;
  std::unique_ptr<kernels::ModelOps> ops;
  std::shared_ptr<const model::Weights> weights;
};

inline std::vector<std::int32_t> random_tokens(std::int64_t count, std::int64_t vocab, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::int32_t> out;
  for (std::int64_t i = 0; i < count; ++i) {
    out.push_back(static_cast<std::int32_t>(random() % static_cast<std::uint32_t>(vocab)));
  }
  return out;
}

}  // namespace treeattn::testing_model
