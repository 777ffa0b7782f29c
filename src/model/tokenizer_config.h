// SPDX-License-Identifier: Apache-2.0
// tokenizer_config.json: the names of the first and the last token, and whether the model chats the Llama 3 way.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace treeattn::model {

struct TokenizerConfig {
  std::optional<std::string> bos;  // "<|begin_of_text|>"
  std::optional<std::string> eos;
  std::optional<std::string> chat_template;  // the one called "default" where there are several

  bool operator==(const TokenizerConfig&) const = default;
};

// Throws BadFile. A chat_template.jinja beside the file is the template, as newer models have it.
TokenizerConfig read_tokenizer_config(const std::filesystem::path& file);
TokenizerConfig parse_tokenizer_config(std::string_view json, const std::string& name);

// Throws Unavailable unless chat_tokens() is what the template means. Templates are programs, and are not run: this
// looks for the special tokens of Llama 3's header in it. What a template adds by itself, such as the date that Llama
// 3.1 and later put into the system message, is for the caller to write into that message. `name` stands for the file.
void require_llama3_chat(const TokenizerConfig& config, const std::string& name);

}  // namespace treeattn::model
