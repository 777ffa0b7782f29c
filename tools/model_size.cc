// SPDX-License-Identifier: Apache-2.0
#include "model_size.h"

#include <fmt/ranges.h>

#include <filesystem>

#include "base/check.h"
#include "kernels/problem.h"
#include "model/weights.h"
#include "option_errors.h"

namespace treeattn::tools {

model::LlamaConfig find_model(const std::string& name_or_directory) {
  for (const std::string_view known : model::known_shapes()) {
    if (name_or_directory == known) return model::known_shape(known);
  }
  const std::filesystem::path path(name_or_directory);
  std::error_code ignored;
  base::require(std::filesystem::is_directory(path, ignored),
                "--model is \"{}\"; accepted: {}, or a directory with config.json", name_or_directory,
                fmt::join(model::known_shapes(), ", "));
  return inside_option("--model", [&] { return model::read_config(path / "config.json"); });
}

plan::ModelSize model_size(const model::LlamaConfig& config, DType weights, DType kv) {
  plan::ModelSize size;
  size.layers = config.layers;
  size.hidden = config.hidden;
  size.heads = config.heads;
  size.kv_heads = config.kv_heads;
  size.head_dim = config.head_dim;
  size.feed_forward = config.feed_forward;
  size.vocab = config.vocab;
  // A tied table of embeddings is the last matrix too, and read as such.
  const std::int64_t looked_up = config.tied_embeddings ? 0 : config.vocab * config.hidden;
  size.read_weights = config.parameters() - looked_up;
  // As the other commands keep them: int8 is made of what is stored, and leaves the table of embeddings as it is.
  model::LlamaConfig kept = config;
  if (weights != DType::kInt8) kept.stored = weights;
  const WeightFormat format = weights == DType::kInt8 ? WeightFormat::kInt8 : WeightFormat::kAsStored;
  size.weight_bytes = model::all_weight_bytes(kept, format);
  size.read_weight_bytes = model::weight_bytes(static_cast<std::size_t>(size.read_weights), format, kept.stored);
  size.kv_row_bytes =
      static_cast<std::uint64_t>(config.head_dim) * dtype_size(kv) + (kernels::has_scales(kv) ? sizeof(float) : 0);
  return size;
}

}  // namespace treeattn::tools
