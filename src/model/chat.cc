// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>

#include "base/check.h"
#include "model/json.h"
#include "model/tokenizer.h"
#include "model/utf8.h"

namespace treeattn::model {
namespace {

// What Python's strip() takes away, and so the trim of the template: White_Space and four separators of ASCII.
bool is_trimmed(char32_t code) { return is_white_space(code) || (code >= 0x1c && code <= 0x1f); }

std::string_view trim(std::string_view text) {
  std::size_t begin = text.size(), end = 0;  // of what stays
  for (std::size_t at = 0; at < text.size();) {
    const Utf8Step step = next_utf8(text.substr(at));
    if (step.kind != Utf8Step::kCharacter || !is_trimmed(step.code)) {
      begin = std::min(begin, at);
      end = at + step.bytes;
    }
    at += step.bytes;
  }
  return begin < end ? text.substr(begin, end - begin) : std::string_view();
}

class PromptWriter {
 public:
  explicit PromptWriter(const Tokenizer& tokenizer)
      : tokenizer_(tokenizer),
        begin_text_(required("<|begin_of_text|>")),
        begin_header_(required("<|start_header_id|>")),
        end_header_(required("<|end_header_id|>")),
        end_turn_(required("<|eot_id|>")) {
    tokens.push_back(begin_text_);
  }

  void message(const std::string& role, std::string_view content) {
    header(role);
    // In one piece: the tokens of the line breaks depend on what follows them.
    plain(std::string(kAfterHeader).append(content));
    tokens.push_back(end_turn_);
  }
  void begin_message(const std::string& role) {
    header(role);
    plain(kAfterHeader);
  }

  std::vector<std::int32_t> tokens;

 private:
  static constexpr std::string_view kAfterHeader = "\n\n";

  void header(const std::string& role) {
    tokens.push_back(begin_header_);
    plain(role);
    tokens.push_back(end_header_);
  }
  void plain(std::string_view text) {
    const auto more = tokenizer_.encode(text);
    tokens.insert(tokens.end(), more.begin(), more.end());
  }
  std::int32_t required(const char* token) const {
    const auto found = tokenizer_.find(token);
    // One that is not special would be found in what the user wrote, too.
    base::require(found && tokenizer_.is_special(*found),
                  "the tokenizer has no special token {}; accepted for chat: the tokenizer of a Llama 3 model", token);
    return *found;
  }

  const Tokenizer& tokenizer_;
  std::int32_t begin_text_, begin_header_, end_header_, end_turn_;
};

void check_role(const std::string& role) {
  base::require(role == "system" || role == "user" || role == "assistant" || role == "ipython",
                "role \"{}\"; accepted: system, user, assistant or ipython", shown(role));
}

std::string dated(std::string_view date, std::string_view system) {
  return fmt::format("Cutting Knowledge Date: December 2023\nToday Date: {}\n\n{}", date, system);
}

}  // namespace

std::vector<std::int32_t> chat_tokens(const Tokenizer& tokenizer, std::span<const ChatMessage> messages,
                                      bool begin_answer, std::string_view date) {
  PromptWriter writer(tokenizer);
  for (const ChatMessage& message : messages) check_role(message.role);
  if (!date.empty()) {
    const bool told = !messages.empty() && messages.front().role == "system";
    writer.message("system", dated(date, told ? trim(messages.front().content) : std::string_view()));
    if (told) messages = messages.subspan(1);
  }
  for (const ChatMessage& message : messages) writer.message(message.role, trim(message.content));
  if (begin_answer) writer.begin_message("assistant");
  return std::move(writer.tokens);
}

}  // namespace treeattn::model
