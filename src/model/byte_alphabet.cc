// SPDX-License-Identifier: Apache-2.0
#include "model/byte_alphabet.h"

#include <array>

#include "model/utf8.h"

namespace treeattn::model {
namespace {

constexpr char32_t kFirstSubstitute = 256;

// Bytes that are printable in Latin-1 stand for themselves; the others are 256, 257, ... in their order.
constexpr bool is_printable(unsigned byte) { return (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte != 0xad); }

constexpr std::array<char32_t, 256> kCharacters = [] {
  std::array<char32_t, 256> table{};
  char32_t substitute = kFirstSubstitute;
  for (unsigned byte = 0; byte < 256; ++byte) table[byte] = is_printable(byte) ? byte : substitute++;
  return table;
}();

constexpr std::size_t kCodes = 256 + 68;  // 68 bytes are not printable
constexpr std::array<int, kCodes> kBytes = [] {
  std::array<int, kCodes> table{};
  table.fill(-1);
  for (int byte = 0; byte < 256; ++byte) table[kCharacters[static_cast<std::size_t>(byte)]] = byte;
  return table;
}();

}  // namespace

std::string byte_character(unsigned char byte) {
  std::string out;
  put_utf8(kCharacters[byte], out);
  return out;
}

std::optional<std::string> bytes_of_alphabet(std::string_view text) {
  std::string bytes;
  while (!text.empty()) {
    const Utf8Step step = next_utf8(text);
    if (step.kind != Utf8Step::kCharacter || step.code >= kCodes || kBytes[step.code] < 0) return std::nullopt;
    bytes += static_cast<char>(static_cast<unsigned char>(kBytes[step.code]));
    text.remove_prefix(step.bytes);
  }
  return bytes;
}

}  // namespace treeattn::model
