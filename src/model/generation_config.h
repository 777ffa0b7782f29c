// SPDX-License-Identifier: Apache-2.0
// How to choose tokens: what generation_config.json says.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "treeattn/llama.h"

namespace treeattn::model {

// Absent keys have Hugging Face's defaults.
struct GenerationConfig {
  SamplerOptions sampler{};  // takes the most likely token unless do_sample is true
  std::optional<std::int64_t> max_new_tokens;
  std::vector<std::int32_t> eos;  // any of them ends a text

  bool operator==(const GenerationConfig&) const = default;
};

// Throws BadFile, naming the file, the key, its value and what is accepted. A way of choosing that is none of the above
// (beams and the like) is refused when it is switched on; keys that do not change which token is chosen are ignored.
GenerationConfig read_generation_config(const std::filesystem::path& file);
GenerationConfig parse_generation_config(std::string_view json, const std::string& name);

}  // namespace treeattn::model
