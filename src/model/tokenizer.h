// SPDX-License-Identifier: Apache-2.0
// Text to tokens and back: byte-level BPE as in tokenizer.json, with added and special tokens.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace treeattn::model {

class Tokenizer {
 public:
  // tokenizer.json. Throws BadFile, naming what is wrong or not supported, and what is.
  static Tokenizer read(const std::filesystem::path& file);
  static Tokenizer parse(std::string_view json, const std::string& name);
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  std::int64_t vocab() const;
  // Ids of what plain text becomes lie below; those of added tokens may lie beyond.
  std::int64_t plain_vocab() const;
  // special: whether "<|eot_id|>" in the text is that token or just text. Throws InvalidArgument for text that is not
  // UTF-8, naming the place.
  std::vector<std::int32_t> encode(std::string_view text, bool special = false) const;
  // The bytes of tokens; a character may be cut at the ends. Special tokens are left out unless asked for, and
  // those from vocab() on always: a model may have more tokens, to fill up a round number, and say one of them. Throws
  // InvalidArgument for a token below 0.
  std::string decode(std::span<const std::int32_t> tokens, bool special = false) const;
  std::optional<std::int32_t> find(std::string_view token) const;  // an added token, by its text
  bool is_special(std::int32_t token) const;
  // What comes before a text, as the file says or as it was set; encode() does not put it there.
  std::optional<std::int32_t> bos() const;
  void set_bos(std::optional<std::int32_t> token);
  // Of what decode() makes of every token.
  std::uint32_t digest() const;

 private:
  struct Impl;
  explicit Tokenizer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Bytes of a stream of tokens put out as whole UTF-8 characters; what is cut waits for the next token.
class TextStream {
 public:
  // before: tokens put out already, but for half of a character at their end, which waits for the next one.
  explicit TextStream(const Tokenizer& tokenizer, std::span<const std::int32_t> before = {});
  std::string next(std::int32_t token);
  std::string finish();  // what is left; bytes that are no character become U+FFFD

 private:
  const Tokenizer* tokenizer_;
  std::string waiting_;
};

struct ChatMessage {
  std::string role;  // "system", "user", "assistant", "ipython"
  std::string content;
};

// The Llama 3 chat template, as tokens: the header of every message is special tokens, its content is plain text.
// date: what templates from Llama 3.1 on say of today before the system message, or in its place; empty: nothing, as in
// Llama 3. Throws InvalidArgument for an unknown role or a tokenizer without the tokens of the template.
std::vector<std::int32_t> chat_tokens(const Tokenizer& tokenizer, std::span<const ChatMessage> messages,
                                      bool begin_answer, std::string_view date = {});

}  // namespace treeattn::model
