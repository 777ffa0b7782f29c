// SPDX-License-Identifier: Apache-2.0
// The alphabet of byte-level vocabularies: every byte is written as one printable character.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace treeattn::model {

// The character of a byte, as UTF-8.
std::string byte_character(unsigned char byte);

// The bytes that UTF-8 text in the alphabet stands for; nothing when a character is not of the alphabet.
std::optional<std::string> bytes_of_alphabet(std::string_view text);

}  // namespace treeattn::model
