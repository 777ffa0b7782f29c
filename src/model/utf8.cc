// SPDX-License-Identifier: Apache-2.0
#include "model/utf8.h"

namespace treeattn::model {

Utf8Step next_utf8(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned lead = byte(0);
  if (lead < 0x80) return {Utf8Step::kCharacter, 1, lead};
  if (lead < 0xc2 || lead > 0xf4) return {Utf8Step::kWrong, 1, 0};
  const std::size_t length = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  char32_t code = lead & (0xffu >> (length + 1));
  for (std::size_t i = 1; i < length; ++i) {
    if (i == text.size()) return {Utf8Step::kCut, i, 0};
    // Only the second byte is limited further: by what would be overlong, a surrogate, or beyond U+10FFFF.
    const bool second = i == 1;
    const unsigned low = second && lead == 0xe0 ? 0xa0u : second && lead == 0xf0 ? 0x90u : 0x80u;
    const unsigned high = second && lead == 0xed ? 0x9fu : second && lead == 0xf4 ? 0x8fu : 0xbfu;
    if (byte(i) < low || byte(i) > high) return {Utf8Step::kWrong, i, 0};
    code = code << 6 | (byte(i) & 0x3fu);
  }
  return {Utf8Step::kCharacter, length, code};
}

void put_utf8(char32_t code, std::string& out) {
  const auto put = [&](char32_t byte) { out += static_cast<char>(static_cast<unsigned char>(byte)); };
  const auto tail = [&](int shift) { put(0x80 | (code >> shift & 0x3f)); };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xc0 | code >> 6);
    tail(0);
  } else if (code < 0x10000) {
    put(0xe0 | code >> 12);
    tail(6);
    tail(0);
  } else {
    put(0xf0 | code >> 18);
    tail(12);
    tail(6);
    tail(0);
  }
}

std::size_t valid_utf8(std::string_view text) {
  std::size_t at = 0;
  while (at < text.size()) {
    const Utf8Step step = next_utf8(text.substr(at));
    if (step.kind != Utf8Step::kCharacter) break;
    at += step.bytes;
  }
  return at;
}

bool is_white_space(char32_t code) {
  return (code >= 0x09 && code <= 0x0d) || code == 0x20 || code == 0x85 || code == 0xa0 || code == 0x1680 ||
         (code >= 0x2000 && code <= 0x200a) || code == 0x2028 || code == 0x2029 || code == 0x202f || code == 0x205f ||
         code == 0x3000;
}

std::size_t space_at_end(std::string_view text) {
  std::size_t begin = text.size();
  while (begin > 0) {
    std::size_t character = begin - 1;
    while (character > 0 && (static_cast<unsigned char>(text[character]) & 0xc0) == 0x80) --character;
    if (!is_white_space(next_utf8(text.substr(character)).code)) break;
    begin = character;
  }
  return begin;
}

std::size_t space_at_begin(std::string_view text) {
  std::size_t end = 0;
  while (end < text.size()) {
    const Utf8Step step = next_utf8(text.substr(end));
    if (!is_white_space(step.code)) break;
    end += step.bytes;
  }
  return end;
}

}  // namespace treeattn::model
