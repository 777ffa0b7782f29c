// SPDX-License-Identifier: Apache-2.0
#include "model/tokenizer_config.h"

#include <fmt/format.h>

#include "model/json.h"
#include "treeattn/error.h"

namespace treeattn::model {
namespace {

constexpr std::uint64_t kLargestTokenizerConfig = std::uint64_t{8} << 20;
constexpr std::size_t kMostTemplates = 64;

// "token" or {"content": "token", ...}.
std::optional<std::string> read_token(const JsonNode& json, const std::string& key) {
  const auto found = json.find(key);
  if (!found) return std::nullopt;
  if (found->value().is_object()) return found->at("content").text();
  return found->text();
}

// "template" or [{"name": "default", "template": "template"}, ...].
std::optional<std::string> read_chat_template(const JsonNode& json) {
  const auto found = json.find("chat_template");
  if (!found) return std::nullopt;
  if (!found->value().is_array()) return found->text();
  std::optional<std::string> chosen;
  for (const JsonNode& one : found->elements(kMostTemplates)) {
    const std::string text = one.at("template").text();
    if (one.at("name").text() == "default") chosen = text;
  }
  return chosen;
}

}  // namespace

TokenizerConfig parse_tokenizer_config(std::string_view text, const std::string& name) {
  const Json value = parse_json(text, name);
  const JsonNode json(value, name);
  return {read_token(json, "bos_token"), read_token(json, "eos_token"), read_chat_template(json)};
}

TokenizerConfig read_tokenizer_config(const std::filesystem::path& file) {
  TokenizerConfig config = parse_tokenizer_config(read_text(file, kLargestTokenizerConfig), file.string());
  const auto beside = file.parent_path() / "chat_template.jinja";
  std::error_code ignored;
  if (std::filesystem::exists(beside, ignored)) config.chat_template = read_text(beside, kLargestTokenizerConfig);
  return config;
}

void require_llama3_chat(const TokenizerConfig& config, const std::string& name) {
  if (!config.chat_template) {
    throw Unavailable(
        fmt::format("{}: no chat_template, so this model does not chat; accepted: an instruct model of "
                    "the Llama 3 family",
                    name));
  }
  for (const char* token : {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"}) {
    if (config.chat_template->find(token) == std::string::npos) {
      throw Unavailable(
          fmt::format("{}: the chat_template does not write {}; accepted: that of the Llama 3 family", name, token));
    }
  }
}

}  // namespace treeattn::model
