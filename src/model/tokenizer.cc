// SPDX-License-Identifier: Apache-2.0
#include "model/tokenizer.h"

#include <utility>

#include "base/check.h"
#include "base/checksum.h"
#include "base/file.h"
#include "model/json.h"
#include "model/splitter.h"
#include "model/tokenizer_file.h"
#include "model/utf8.h"

namespace treeattn::model {
namespace {

constexpr std::uint64_t kLargestTokenizerFile = std::uint64_t{64} << 20;
constexpr std::size_t kLongestText = std::size_t{1} << 30;

}  // namespace

struct Tokenizer::Impl {
  Impl(TokenizerFile file, const std::string& name)
      : token_bytes(std::move(file.token_bytes)),
        bpe(file.byte_tokens, file.merges, static_cast<std::int64_t>(token_bytes.size())),
        words(std::move(file.words)),
        special(token_bytes.size()),
        bos(file.bos),
        plain_vocab(file.plain_vocab) {
    for (const std::string& pattern : file.patterns) splitters.push_back(make_splitter(pattern, name));
    for (const AddedToken& token : file.added) special[static_cast<std::size_t>(token.id)] = token.special;
    added = AddedTokens(std::move(file.added));
  }

  // Text without added tokens.
  void encode_plain(std::string_view text, std::vector<std::int32_t>& tokens) const {
    std::vector<std::string_view> pieces{text}, finer;
    for (const auto& splitter : splitters) {
      finer.clear();
      for (const std::string_view piece : pieces) splitter->split(piece, finer);
      std::swap(pieces, finer);
    }
    for (const std::string_view word : pieces) {
      if (const auto whole = words.find(word); whole != words.end()) {
        tokens.push_back(whole->second);
      } else {
        bpe.encode(word, tokens);
      }
    }
  }

  std::vector<std::string> token_bytes;  // [id]
  Bpe bpe;
  Words words;
  std::vector<std::unique_ptr<Splitter>> splitters;
  AddedTokens added;
  std::vector<bool> special;  // [id]
  std::optional<std::int32_t> bos;
  std::int64_t plain_vocab;
};

Tokenizer::Tokenizer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

Tokenizer Tokenizer::read(const std::filesystem::path& file) {
  return parse(base::read_text(file, kLargestTokenizerFile), file.string());
}

Tokenizer Tokenizer::parse(std::string_view json, const std::string& name) {
  return Tokenizer(std::make_unique<Impl>(parse_tokenizer_file(json, name), name));
}

std::int64_t Tokenizer::vocab() const { return static_cast<std::int64_t>(impl_->token_bytes.size()); }

std::int64_t Tokenizer::plain_vocab() const { return impl_->plain_vocab; }

std::vector<std::int32_t> Tokenizer::encode(std::string_view text, bool special) const {
  base::require(text.size() <= kLongestText, "text of {} bytes; accepted: at most {}", text.size(), kLongestText);
  const std::size_t valid = valid_utf8(text);
  base::require(valid == text.size(), "text: byte {} of {} is not UTF-8; accepted: UTF-8", valid, text.size());
  std::vector<std::int32_t> tokens;
  for (const TextPart& part : impl_->added.split(text, special)) {
    if (part.token) {
      tokens.push_back(*part.token);
    } else {
      impl_->encode_plain(part.text, tokens);
    }
  }
  return tokens;
}

std::string Tokenizer::decode(std::span<const std::int32_t> tokens, bool special) const {
  base::require_address("tokens", tokens);
  std::string bytes;
  for (const std::int32_t token : tokens) {
    base::require(token >= 0, "token {}; accepted: 0 or more", token);
    if (token >= vocab()) continue;
    if (special || !is_special(token)) bytes += impl_->token_bytes[static_cast<std::size_t>(token)];
  }
  return bytes;
}

std::optional<std::int32_t> Tokenizer::find(std::string_view token) const {
  const AddedToken* found = impl_->added.find(token);
  return found == nullptr ? std::nullopt : std::optional(found->id);
}

bool Tokenizer::is_special(std::int32_t token) const {
  return token >= 0 && token < vocab() && impl_->special[static_cast<std::size_t>(token)];
}

std::optional<std::int32_t> Tokenizer::bos() const { return impl_->bos; }

std::uint32_t Tokenizer::digest() const {
  const std::vector<std::uint8_t> special(impl_->special.begin(), impl_->special.end());
  return base::crc32c(std::as_bytes(std::span(special)), base::crc32c_of_texts(impl_->token_bytes));
}

void Tokenizer::set_bos(std::optional<std::int32_t> token) { impl_->bos = token; }

}  // namespace treeattn::model
