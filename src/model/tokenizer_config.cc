// SPDX-License-Identifier: Apache-2.0
#include "model/tokenizer_config.h"

#include <fmt/format.h>

#include "base/file.h"
#include "model/json.h"
#include "treeattn/error.h"

namespace treeattn::model {
namespace {

constexpr std::uint64_t kLargestTokenizerConfig = std::uint64_t{8} << 20;
constexpr std::size_t kMostTemplates = 64;

// How published templates write a message and begin an answer, without spaces.
constexpr std::string_view kMessage =
    "'<|start_header_id|>'+message['role']+'<|end_header_id|>\n\n'+message['content']|trim+'<|eot_id|>'";
constexpr std::string_view kAnswer = "'<|start_header_id|>assistant<|end_header_id|>\n\n'";

// "token" or {"content": "token", ...}.
std::optional<std::string> read_token(const JsonNode& json, const std::string& key) {
  const auto found = json.find(key);
  if (!found) return std::nullopt;
  if (found->value().is_object()) return found->at("content").text();
  return found->text();
}

// As LlamaTokenizerFast of transformers 4 makes its template. Other classes take that of tokenizer.json.
std::optional<bool> read_begins_with_bos(const JsonNode& json) {
  const auto type = json.find("tokenizer_class");
  if (!type || (type->text() != "LlamaTokenizer" && type->text() != "LlamaTokenizerFast")) return std::nullopt;
  if (json.boolean_or("add_eos_token", false)) json.at("add_eos_token").refuse("false");
  return json.boolean_or("add_bos_token", !json.value().contains("add_bos_token"));  // null is false
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

// With line breaks as they are: some files escape them once more, for Jinja.
std::string unescaped(std::string_view text) {
  std::string out;
  for (std::size_t at = 0; at < text.size(); ++at) {
    const bool escaped = text.substr(at, 2) == "\\n";
    out += escaped ? '\n' : text[at];
    at += escaped ? 1 : 0;
  }
  return out;
}

// What stands between two strings; nothing where one is missing.
std::string between(const std::string& text, std::string_view before, char after) {
  const std::size_t found = text.find(before);
  if (found == std::string::npos) return {};
  const std::size_t begin = found + before.size(), end = text.find(after, begin);
  return end == std::string::npos ? std::string() : text.substr(begin, end - begin);
}

}  // namespace

TokenizerConfig parse_tokenizer_config(std::string_view text, const std::string& name) {
  const Json value = parse_json(text, name);
  const JsonNode json(value, name);
  return {read_token(json, "bos_token"), read_token(json, "eos_token"), read_chat_template(json),
          read_begins_with_bos(json)};
}

TokenizerConfig read_tokenizer_config(const std::filesystem::path& file) {
  TokenizerConfig config = parse_tokenizer_config(base::read_text(file, kLargestTokenizerConfig), file.string());
  const auto beside = file.parent_path() / "chat_template.jinja";
  if (base::is_there(beside)) config.chat_template = base::read_text(beside, kLargestTokenizerConfig);
  return config;
}

ChatForm llama3_chat_form(const TokenizerConfig& config, const std::string& name) {
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
  const std::string text = unescaped(*config.chat_template);
  std::string dense = text;
  std::erase(dense, ' ');
  const auto has = [](const std::string& where, std::string_view what) {
    return where.find(what) != std::string::npos;
  };
  ChatForm form;
  form.dated = has(text, "\"Cutting Knowledge Date: December 2023\n\"") &&
               has(text, "\"Today Date: \" + date_string + \"\n\n\"");
  const bool today = has(text, "date_string = strftime_now(\"%d %b %Y\")");
  if (form.dated && !today) form.date = between(text, "date_string = \"", '"');
  // A system message of their own is no other than that, with or without one of the user.
  const bool known_system = form.dated ? (today || !form.date.empty()) && has(text, "set system_message = \"\"")
                                       : !has(text, "system<|end_header_id|>");
  form.published = has(dense, kMessage) && has(dense, kAnswer) && known_system;
  return form;
}

}  // namespace treeattn::model
