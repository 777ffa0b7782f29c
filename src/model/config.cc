// SPDX-License-Identifier: Apache-2.0
#include "model/config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/check.h"
#include "base/file.h"
#include "kernels/head_dims.h"
#include "model/json.h"
#include "model/tensor_list.h"
#include "model/token_ids.h"

namespace treeattn::model {
namespace {

using kernels::kHeadDimStep, kernels::kLeastHeadDim, kernels::kMostHeadDim;

constexpr std::uint64_t kLargestConfigFile = 1 << 20;
// Far above any published model, and low enough that no product of sizes overflows 64 bits.
constexpr std::int64_t kLargestVocab = std::int64_t{1} << 22;  // of the vocabulary
constexpr std::int64_t kWidest = std::int64_t{1} << 20;        // of a row
constexpr std::int64_t kMostLayers = 1024;
constexpr std::int64_t kMostHeads = 1024;
constexpr std::int64_t kLongestContext = std::int64_t{1} << 30;

void require_text(const JsonNode& config, const std::string& key, std::string_view accepted) {
  const auto found = config.find(key);
  if (found && found->text() != accepted) found->refuse(fmt::format("\"{}\"", accepted));
}

void require_false(const JsonNode& config, const std::string& key) {
  const auto found = config.find(key);
  if (found && found->boolean()) found->refuse("false");
}

void require_whole_rotation(const JsonNode& json) {
  if (const auto found = json.find("partial_rotary_factor"); found && found->number(0, 1) != 1) found->refuse("1");
}

void check_architecture(const JsonNode& config) {
  require_text(config, "model_type", "llama");
  const auto names = config.find("architectures");
  if (!names && !config.find("model_type")) {
    base::throw_bad_file(config.file(),
                         "has neither model_type nor architectures; accepted: \"llama\" or "
                         "[\"LlamaForCausalLM\"]");
  }
  if (names) {
    const auto listed = names->elements(16);
    if (listed.size() != 1) names->refuse("[\"LlamaForCausalLM\"]");
    if (listed[0].text() != "LlamaForCausalLM") listed[0].refuse("\"LlamaForCausalLM\"");
  }
  require_text(config, "hidden_act", "silu");
  require_false(config, "attention_bias");
  require_false(config, "mlp_bias");
  if (const auto found = config.find("quantization_config")) found->refuse("weights that are not quantized");
  require_whole_rotation(config);
}

std::optional<RopeScaling> read_scaling(const JsonNode& rope) {
  auto type = rope.find("rope_type");
  if (!type) type = rope.find("type");  // as older files say
  if (!type) type = rope.at("rope_type");
  if (type->text() == "default") return std::nullopt;
  if (type->text() != "llama3") type->refuse("\"llama3\" or \"default\"");
  RopeScaling scaling;
  scaling.factor = rope.at("factor").number(1, 1e6);
  scaling.low_freq_factor = rope.at("low_freq_factor").number(1e-6, 1e6);
  const JsonNode high = rope.at("high_freq_factor");
  scaling.high_freq_factor = high.number(1e-6, 1e6);
  // The ramp between them divides by their difference.
  if (scaling.high_freq_factor <= scaling.low_freq_factor) high.refuse("more than low_freq_factor");
  scaling.original_context = rope.integer("original_max_position_embeddings", 1, kLongestContext);
  return scaling;
}

void read_rope(const JsonNode& json, LlamaConfig& config) {
  constexpr double kDefaultTheta = 10000;  // of Hugging Face's LlamaConfig
  config.rope_theta = json.number_or("rope_theta", kDefaultTheta, 1, 1e12);
  // Newer files keep everything about the rotation in one object. As transformers does: an older one counts first, and
  // a base that is not in it is the one beside it.
  auto rope = json.find("rope_scaling");
  if (!rope) rope = json.find("rope_parameters");
  if (!rope) return;
  require_whole_rotation(*rope);
  config.rope_theta = rope->number_or("rope_theta", config.rope_theta, 1, 1e12);
  config.rope_scaling = read_scaling(*rope);
}

// null is an answer, too: none.
void read_eos(const JsonNode& json, LlamaConfig& config) {
  constexpr std::int32_t kDefaultEos = 2;  // of Hugging Face's LlamaConfig
  config.eos_is_default = !json.value().contains("eos_token_id");
  if (config.eos_is_default && kDefaultEos < config.vocab) config.eos = {kDefaultEos};
  if (const auto eos = json.find("eos_token_id")) config.eos = read_token_ids(*eos, config.vocab - 1);
}

LlamaConfig llama3(std::int64_t hidden, std::int64_t layers, std::int64_t heads, std::int64_t feed_forward,
                   double rope_factor, bool tied) {
  LlamaConfig config;
  config.vocab = 128256;
  config.hidden = hidden;
  config.layers = layers;
  config.heads = heads;
  config.kv_heads = 8;
  config.head_dim = hidden / heads;
  config.feed_forward = feed_forward;
  config.context = 131072;
  config.rope_scaling = RopeScaling{.factor = rope_factor};
  config.tied_embeddings = tied;
  config.eos = {128001, 128008, 128009};
  return config;
}

// Only to say beforehand how much memory is needed: a name that is not known is nobody's mistake.
DType read_stored_type(const JsonNode& json) {
  for (const char* key : {"torch_dtype", "dtype"}) {
    const auto name = json.find(key);
    if (!name || !name->value().is_string()) continue;
    for (const DType type : {DType::kFloat32, DType::kFloat16}) {
      if (name->text() == dtype_name(type)) return type;
    }
  }
  return DType::kBFloat16;
}

}  // namespace

std::int64_t LlamaConfig::parameters() const {
  std::int64_t sum = 0;
  for (const NamedShape& tensor : tensor_list(*this)) sum += tensor.elements();
  return sum;
}

LlamaConfig parse_config(std::string_view text, const std::string& name) {
  const Json value = parse_json(text, name);
  const JsonNode json(value, name);
  check_architecture(json);
  LlamaConfig config;
  config.vocab = json.integer("vocab_size", 1, kLargestVocab);
  config.hidden = json.integer("hidden_size", 1, kWidest);
  config.layers = json.integer("num_hidden_layers", 1, kMostLayers);
  config.heads = json.integer("num_attention_heads", 1, kMostHeads);
  config.kv_heads = json.integer_or("num_key_value_heads", config.heads, 1, config.heads);
  if (config.heads % config.kv_heads != 0) {
    json.at("num_key_value_heads").refuse(fmt::format("a divisor of num_attention_heads = {}", config.heads));
  }
  if (const auto head_dim = json.find("head_dim")) {
    config.head_dim = head_dim->integer(kLeastHeadDim, kMostHeadDim);
    if (config.head_dim % kHeadDimStep != 0) head_dim->refuse(fmt::format("a multiple of {}", kHeadDimStep));
  } else {
    config.head_dim = config.hidden / config.heads;
    if (config.hidden % config.heads != 0 || !kernels::takes_head_dim(config.head_dim)) {
      json.at("hidden_size")
          .refuse(fmt::format("without head_dim: num_attention_heads = {} times {} to {} in steps of {}", config.heads,
                              kLeastHeadDim, kMostHeadDim, kHeadDimStep));
    }
  }
  config.feed_forward = json.integer("intermediate_size", 1, kWidest);
  config.context = json.integer("max_position_embeddings", 1, kLongestContext);
  config.rms_eps = json.number_or("rms_norm_eps", 1e-6, 1e-12, 1);
  read_rope(json, config);
  config.tied_embeddings = json.boolean_or("tie_word_embeddings", false);
  config.stored = read_stored_type(json);
  read_eos(json, config);
  return config;
}

LlamaConfig read_config(const std::filesystem::path& file) {
  return parse_config(base::read_text(file, kLargestConfigFile), file.string());
}

std::vector<std::string_view> known_shapes() {
  return {"llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b"};
}

LlamaConfig known_shape(std::string_view name) {
  if (name == "llama-3.2-1b") return llama3(2048, 16, 32, 8192, 32, true);
  if (name == "llama-3.2-3b") return llama3(3072, 28, 24, 8192, 32, true);
  if (name == "llama-3.1-8b") return llama3(4096, 32, 32, 14336, 8, false);
  if (name == "llama-3.1-70b") return llama3(8192, 80, 64, 28672, 8, false);
  if (name == "llama-3.1-405b") return llama3(16384, 126, 128, 53248, 8, false);
  base::throw_invalid("no known model shape is called \"{}\"; accepted: {}", shown(name),
                      fmt::join(known_shapes(), ", "));
}

}  // namespace treeattn::model
