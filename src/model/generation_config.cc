// SPDX-License-Identifier: Apache-2.0
#include "model/generation_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "base/file.h"
#include "model/json.h"
#include "model/token_ids.h"

namespace treeattn::model {
namespace {

constexpr std::uint64_t kLargestGenerationFile = 1 << 20;

// Ways of choosing that are not supported, and the value that switches each off.
constexpr struct {
  const char* key;
  double off;
} kUnsupported[] = {
    {"num_beams", 1},     {"num_beam_groups", 1}, {"no_repeat_ngram_size", 0}, {"encoder_no_repeat_ngram_size", 0},
    {"typical_p", 1},     {"epsilon_cutoff", 0},  {"eta_cutoff", 0},           {"diversity_penalty", 0},
    {"min_length", 0},    {"min_new_tokens", 0},  {"penalty_alpha", 0},        {"encoder_repetition_penalty", 1},
    {"guidance_scale", 1}};

// Others, which are off where there is nothing in them.
constexpr const char* kMustBeEmpty[] = {"suppress_tokens",       "bad_words_ids",   "exponential_decay_length_penalty",
                                        "begin_suppress_tokens", "force_words_ids", "sequence_bias",
                                        "forced_bos_token_id",   "constraints",     "watermarking_config",
                                        "forced_eos_token_id",   "dola_layers",     "top_h",
                                        "stop_strings",          "max_time"};

// Where nothing is drawn, what narrows the choice is checked and has no effect.
SamplerOptions read_sampler(const JsonNode& json) {
  SamplerOptions drawn;
  drawn.temperature = json.number_or("temperature", 1, 0, 100);
  const int otherwise = json.value().contains("top_k") ? 0 : 50;  // null is an answer: all
  drawn.top_k = json.integer_or("top_k", otherwise, 0, std::numeric_limits<std::int32_t>::max());
  drawn.top_p = std::max(json.number_or("top_p", 1, 0, 1), 1e-9);  // both keep the most likely one
  drawn.min_p = json.number_or("min_p", 0, 0, 1);
  drawn.repetition_penalty = json.number_or("repetition_penalty", 1, 0.01, 100);
  SamplerOptions most_likely;
  most_likely.repetition_penalty = drawn.repetition_penalty;
  return json.boolean_or("do_sample", false) ? drawn : most_likely;
}

}  // namespace

GenerationConfig parse_generation_config(std::string_view text, const std::string& name) {
  constexpr double kAny = std::numeric_limits<double>::max();
  const Json value = parse_json(text, name);
  const JsonNode json(value, name);
  json.object();
  for (const auto& [key, off] : kUnsupported) {
    const auto found = json.find(key);
    if (found && found->number(-kAny, kAny) != off) found->refuse(fmt::format("{}, which switches it off", off));
  }
  for (const char* key : kMustBeEmpty) {
    const auto found = json.find(key);
    if (found && !found->value().empty()) found->refuse("null, which switches it off");
  }
  // Takes back the end of the prompt, and says it in its own way.
  if (json.boolean_or("token_healing", false)) json.at("token_healing").refuse("false, which switches it off");
  GenerationConfig config;
  config.sampler = read_sampler(json);
  if (const auto most = json.find("max_new_tokens")) {
    config.max_new_tokens = most->integer(1, std::numeric_limits<std::int32_t>::max());
  }
  if (const auto eos = json.find("eos_token_id")) {
    config.eos = read_token_ids(*eos, std::numeric_limits<std::int32_t>::max());
  }
  return config;
}

GenerationConfig read_generation_config(const std::filesystem::path& file) {
  return parse_generation_config(base::read_text(file, kLargestGenerationFile), file.string());
}

}  // namespace treeattn::model
