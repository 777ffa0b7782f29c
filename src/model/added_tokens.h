// SPDX-License-Identifier: Apache-2.0
// Tokens that are found in a text as they are, before it is cut into words: <|eot_id|> and the like.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace treeattn::model {

struct AddedToken {
  std::string text;
  std::int32_t id = 0;
  bool special = false;
  bool strip_before = false;  // takes the white space before it as well ("lstrip")
  bool strip_after = false;   // and that after it ("rstrip")
  bool normalized = false;    // looked for after the others; without a normalizer there is no other difference
};

// A part of a text: one token, or plain text.
struct TextPart {
  std::string_view text;
  std::optional<std::int32_t> token;
};

// The longest text an added token may have: finding them takes at most so many steps for a byte.
inline constexpr std::size_t kLongestAddedToken = 512;

class AddedTokens {
 public:
  AddedTokens() = default;
  explicit AddedTokens(std::vector<AddedToken> tokens);

  // The parts of `text`, UTF-8. Special tokens are plain text unless `special`.
  std::vector<TextPart> split(std::string_view text, bool special) const;
  const AddedToken* find(std::string_view text) const;

 private:
  // Sorted by text, with where those of each first byte begin.
  struct Table {
    std::vector<AddedToken> tokens;
    std::vector<std::size_t> first;  // [257]
    void make();
    const AddedToken* longest_at(std::string_view text) const;
    void split(std::string_view text, bool special, std::vector<TextPart>& parts) const;
  };
  Table plain_;
  Table normalized_;
};

}  // namespace treeattn::model
