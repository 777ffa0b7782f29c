// SPDX-License-Identifier: Apache-2.0
// What a model directory has, first without its weights, then with them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "kernels/model_ops.h"
#include "model/checkpoint.h"
#include "model/config.h"
#include "model/generation_config.h"
#include "model/tokenizer.h"
#include "model/weights.h"
#include "treeattn/llama.h"
#include "treeattn/thread_pool.h"

namespace treeattn::model {

// All that can be known before a weight is read.
struct ModelDescription {
  LlamaConfig config;
  GenerationConfig generation;
  std::shared_ptr<const Tokenizer> tokenizer;  // null: none
  std::filesystem::path directory;             // empty: random weights
  std::uint64_t seed = 0;

  // With random weights this makes them.
  std::shared_ptr<const Checkpoint> open() const;
};

// config.json, and if they are there generation_config.json, tokenizer.json and tokenizer_config.json. Throws BadFile.
ModelDescription describe_model(const std::filesystem::path& directory);
ModelDescription describe_random_model(std::string_view shape, std::uint64_t seed);

// Throws Unavailable where weights that are made in the host's memory, random ones or copies in another format, take
// more than `available` bytes of it (none: unknown). Asked first, because a system may promise more memory than it has,
// and end the process when that is used.
void require_room_for_weights(const ModelDescription& model, const LlamaLoadOptions& options,
                              std::optional<std::size_t> available);

// begin: with the token in front that begins a text, if the tokenizer has one. Throws InvalidArgument for text that is
// not UTF-8, Unavailable without a tokenizer.
std::vector<std::int32_t> encode_prompt(const ModelDescription& model, std::string_view text, bool begin = true);

}  // namespace treeattn::model

namespace treeattn {

struct LlamaModel::Impl {
  Impl(model::ModelDescription what, const LlamaLoadOptions& options);

  model::ModelDescription description;
  ThreadPool pool;  // for loading, and behind ops
  std::unique_ptr<kernels::ModelOps> ops;
  std::shared_ptr<const model::Weights> weights;
};

}  // namespace treeattn
