// SPDX-License-Identifier: Apache-2.0
// What tokenizer.json says, checked and with the byte alphabet undone.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "model/added_tokens.h"
#include "model/bpe.h"

namespace treeattn::model {

struct TextHash {
  using is_transparent = void;
  std::size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
};
using Words = std::unordered_map<std::string, std::int32_t, TextHash, std::equal_to<>>;

struct TokenizerFile {
  std::vector<std::string> patterns;     // applied one after the other, each to the pieces of the one before
  std::vector<std::string> token_bytes;  // [id]; empty for an id that is no token
  ByteTokens byte_tokens{};
  std::vector<BpeMerge> merges;
  Words words;  // with "ignore_merges": bytes that are one token, whatever the merges say
  std::vector<AddedToken> added;
  std::int64_t plain_vocab = 0;     // ids of what plain text becomes lie below; those of added tokens may not
  std::optional<std::int32_t> bos;  // what the post-processor puts before a text
};

// Throws BadFile.
TokenizerFile parse_tokenizer_file(std::string_view json, const std::string& name);

}  // namespace treeattn::model
