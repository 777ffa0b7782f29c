// SPDX-License-Identifier: Apache-2.0
#include "model/loaded_model.h"

#include <algorithm>
#include <optional>
#include <system_error>
#include <utility>

#include "base/check.h"
#include "model/generation_config.h"
#include "treeattn/error.h"

namespace treeattn::model {

std::shared_ptr<const Checkpoint> ModelDescription::open() const {
  if (directory.empty()) return random_checkpoint(config, seed);
  return open_checkpoint(directory);
}

ModelDescription describe_model(const std::filesystem::path& directory) {
  ModelDescription out;
  out.directory = directory;
  out.config = read_config(directory / "config.json");
  std::error_code ignored;
  // Chat models name more of these than config.json does.
  if (const auto file = directory / "generation_config.json"; std::filesystem::exists(file, ignored)) {
    for (const std::int32_t token : read_generation_config(file).eos) {
      const bool known = std::find(out.config.eos.begin(), out.config.eos.end(), token) != out.config.eos.end();
      if (!known) out.config.eos.push_back(token);
    }
  }
  if (const auto file = directory / "tokenizer.json"; std::filesystem::exists(file, ignored)) {
    out.tokenizer = std::make_shared<Tokenizer>(Tokenizer::read(file));
  }
  return out;
}

ModelDescription describe_random_model(std::string_view shape, std::uint64_t seed) {
  ModelDescription out;
  out.config = known_shape(shape);
  out.seed = seed;
  return out;
}

std::vector<std::int32_t> encode_prompt(const ModelDescription& model, std::string_view text, bool begin) {
  if (!model.tokenizer) throw Unavailable("this model has no tokenizer (tokenizer.json); give tokens instead of text");
  std::vector<std::int32_t> tokens = model.tokenizer->encode(text);
  // Not the bos_token_id of the config: models that were trained without one in front may name one.
  if (const auto bos = model.tokenizer->bos(); begin && bos) tokens.insert(tokens.begin(), *bos);
  return tokens;
}

}  // namespace treeattn::model

namespace treeattn {

namespace {

int gpu_of(const LlamaLoadOptions& options) {
  base::require(options.gpu >= -1, "gpu = {}; accepted: -1 (the CPU) or the index of a GPU", options.gpu);
  return options.gpu;
}

int loading_threads(const LlamaLoadOptions& options) {
  base::require(options.threads >= 0, "threads = {}; accepted: 1 or more, or 0 for one per core", options.threads);
  return options.threads == 0 ? ThreadPool::available_cores() : options.threads;
}

}  // namespace

LlamaModel::Impl::Impl(model::ModelDescription what, const LlamaLoadOptions& options)
    : description(std::move(what)),
      pool(loading_threads(options)),
      ops(kernels::make_model_ops(gpu_of(options), pool)) {
  model::check_weight_format(options.weights);
  model::WeightOptions loading;
  loading.host_memory = options.gpu < 0;
  loading.format = options.weights;
  loading.progress = options.progress;
  weights = std::make_shared<model::Weights>(description.config, description.open(), *ops, pool, loading);
}

}  // namespace treeattn
