// SPDX-License-Identifier: Apache-2.0
// How to choose tokens: what generation_config.json says.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace treeattn::model {

// Absent keys have Hugging Face's defaults.
struct GenerationConfig {
  bool do_sample = false;  // else the most likely token
  double temperature = 1.0;
  std::int64_t top_k = 50;  // 0: no limit
  double top_p = 1.0;
  double min_p = 0.0;
  double repetition_penalty = 1.0;
  std::optional<std::int64_t> max_new_tokens;
  std::vector<std::int32_t> eos;  // any of them ends a text

  bool operator==(const GenerationConfig&) const = default;
};

// Throws BadFile, naming the file, the key, its value and what is accepted. A way of choosing that is none of the above
// (beams and the like) is refused when it is switched on; keys that do not change which token is chosen are ignored.
GenerationConfig read_generation_config(const std::filesystem::path& file);
GenerationConfig parse_generation_config(std::string_view json, const std::string& name);

}  // namespace treeattn::model
