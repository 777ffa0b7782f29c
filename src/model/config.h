// SPDX-License-Identifier: Apache-2.0
// The shape of a Llama model: what config.json says.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "treeattn/dtype.h"

namespace treeattn::model {

// rope_type "llama3": frequencies whose wave is longer than the trained context are divided by `factor`, with a ramp
// in between.
struct RopeScaling {
  double factor = 8.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  std::int64_t original_context = 8192;

  bool operator==(const RopeScaling&) const = default;
};

struct LlamaConfig {
  std::int64_t vocab = 0;
  std::int64_t hidden = 0;
  std::int64_t layers = 0;
  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t feed_forward = 0;
  std::int64_t context = 0;  // max_position_embeddings
  double rms_eps = 1e-5;
  double rope_theta = 500000.0;
  std::optional<RopeScaling> rope_scaling;
  bool tied_embeddings = false;
  DType stored = DType::kBFloat16;  // what the weights are said to be; the files decide
  std::vector<std::int32_t> eos;    // any of them ends a text
  bool eos_is_default = false;      // config.json says nothing of it

  bool operator==(const LlamaConfig&) const = default;

  std::int64_t parameters() const;
};

// Throws BadFile, naming the file, the key, its value and what is accepted.
LlamaConfig read_config(const std::filesystem::path& file);
// The same of text already read; `name` stands for the file in errors.
LlamaConfig parse_config(std::string_view json, const std::string& name);

// Shapes known by name: "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b".
std::vector<std::string_view> known_shapes();
// Throws InvalidArgument naming the known ones.
LlamaConfig known_shape(std::string_view name);

}  // namespace treeattn::model
