// SPDX-License-Identifier: Apache-2.0
// A small Llama on a GPU, for tests that compare what it says.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "model/llama.h"
#include "model_text.h"
#include "small_llama.h"
#include "treeattn/error.h"

namespace treeattn::testing_gpu {

using model::Llama;
using model::LlamaConfig;
using model::Way;
using model::WeightOptions;
using model::Weights;
using testing_model::Text;

inline constexpr int kGpu = 0;

// Heads that the tensor cores take, and matrices that cuBLASLt takes.
inline LlamaConfig wide_config() {
  LlamaConfig c = testing_model::small_config();
  c.vocab = 304;
  c.hidden = 256;
  c.heads = 8;
  c.kv_heads = 2;
  c.head_dim = 64;
  c.feed_forward = 416;
  return c;
}

struct GpuModel {
  explicit GpuModel(const LlamaConfig& config, DType dtype = DType::kBFloat16,
                    WeightFormat format = WeightFormat::kAsStored)
      : pool(1), ops(kernels::cuda_model_ops(kGpu)) {
    WeightOptions options;
    options.format = format;
    options.host_memory = false;
    weights = std::make_shared<Weights>(config, std::make_shared<testing_model::RandomCheckpoint>(1, dtype), *ops, pool,
                                        options);
  }
  ThreadPool pool;
  std::unique_ptr<kernels::ModelOps> ops;
  std::shared_ptr<const Weights> weights;
};

// forced: the tokens to go on with, whatever the logits say; empty: the likeliest.
inline void generate(Llama& llama, SequenceId id, std::vector<float> logits, std::size_t count, Text& text,
                     std::span<const std::int32_t> forced = {}) {
  while (text.tokens.size() < count) {
    const std::int32_t token = forced.empty() ? testing_model::largest(logits) : forced[text.tokens.size()];
    text.tokens.push_back(token);
    text.logits.push_back(logits);
    if (text.tokens.size() < count) llama.decode({&id, 1}, {&token, 1}, logits);
  }
}

inline Text on_one(Llama& llama, std::int64_t prompt, std::size_t count, Way way = Way::kBlocks,
                   std::span<const std::int32_t> forced = {}) {
  Text text;
  const SequenceId id = llama.add_sequence();
  std::vector<float> logits(static_cast<std::size_t>(llama.config().vocab));
  llama.prefill(id, testing_model::random_tokens(prompt, llama.config().vocab, 7), logits, way);
  generate(llama, id, logits, count, text, forced);
  return text;
}

// A prompt, decoded tokens, another prompt and the text that is returned; after a loss it goes on where it was.
// leave(tokens so far): to return without a text.
class Conversation {
 public:
  Conversation() : tokens_(testing_model::random_tokens(kTokens, wide_config().vocab, 5)) {}

  std::optional<Text> run(Llama& llama, const std::function<bool(std::int64_t)>& leave) const {
    if (llama.sequences().empty()) llama.add_sequence();
    const SequenceId id = llama.sequences().front();
    const auto said = [&] { return llama.transcript(id).length(); };
    Text text;
    std::vector<float> logits(static_cast<std::size_t>(wide_config().vocab));
    for (;;) {
      try {
        if (said() < 130) llama.prefill(id, part(said(), 130), {});
        while (said() < 190) llama.decode({&id, 1}, part(said(), said() + 1), logits);
        if (said() < kPrompts) llama.prefill(id, part(said(), kPrompts), {});
        while (said() < kTokens) {
          if (leave(said())) return {};
          text.tokens.resize(static_cast<std::size_t>(said() - kPrompts));
          text.logits.resize(static_cast<std::size_t>(said() - kPrompts));
          text.tokens.push_back(tokens_[static_cast<std::size_t>(said())]);
          llama.decode({&id, 1}, part(said(), said() + 1), logits);
          text.logits.push_back(logits);
        }
        return text;
      } catch (const LostRanks&) {
        llama.recover();
      }
    }
  }

 private:
  static constexpr std::int64_t kPrompts = 300, kTokens = 330;
  std::span<const std::int32_t> part(std::int64_t first, std::int64_t end) const {
    return std::span(tokens_).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(end - first));
  }
  std::vector<std::int32_t> tokens_;
};

}  // namespace treeattn::testing_gpu
