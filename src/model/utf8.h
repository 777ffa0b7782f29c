// SPDX-License-Identifier: Apache-2.0
// UTF-8, one character at a time, by the table of the Unicode standard (3-7): no surrogates, nothing overlong.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace treeattn::model {

// What text[0..] begins with.
struct Utf8Step {
  enum Kind { kCharacter, kCut, kWrong };
  Kind kind;          // a character; the beginning of one that the text ends inside of; neither
  std::size_t bytes;  // its length, 1 or more; of a wrong one, what one U+FFFD stands for
  char32_t code;      // of a character
};

// Requires text that is not empty.
Utf8Step next_utf8(std::string_view text);

// Appends.
void put_utf8(char32_t code, std::string& out);

// The length of the longest beginning that is whole characters.
std::size_t valid_utf8(std::string_view text);

// White_Space of Unicode, what \s means in Oniguruma and in Rust.
bool is_white_space(char32_t code);
std::size_t space_at_end(std::string_view text);    // where the white space at the end of UTF-8 text begins
std::size_t space_at_begin(std::string_view text);  // where that at its beginning ends

inline constexpr std::string_view kReplacementCharacter = "\xef\xbf\xbd";

}  // namespace treeattn::model
