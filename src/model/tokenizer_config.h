// SPDX-License-Identifier: Apache-2.0
// tokenizer_config.json: the names of the first and the last token, what a text begins with, and whether the model
// chats the Llama 3 way.
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
  // Whether a text begins with bos, whatever tokenizer.json says: of a tokenizer_class that goes by itself.
  std::optional<bool> begins_with_bos{};

  bool operator==(const TokenizerConfig&) const = default;
};

// Throws BadFile. A chat_template.jinja beside the file is the template, as newer models have it.
TokenizerConfig read_tokenizer_config(const std::filesystem::path& file);
TokenizerConfig parse_tokenizer_config(std::string_view json, const std::string& name);

// How a template writes a conversation, as far as that can be seen: templates are programs, and are not run.
struct ChatForm {
  bool published = true;  // as those of Llama 3 to 3.3 do, so that chat_tokens() has their tokens
  bool dated = false;     // from Llama 3.1 on: the first message is a system message that says the date
  std::string date;       // which; empty: today's

  bool operator==(const ChatForm&) const = default;
};

// Throws Unavailable where the template has no special tokens of Llama 3's header. `name` stands for the file.
ChatForm llama3_chat_form(const TokenizerConfig& config, const std::string& name);

}  // namespace treeattn::model
