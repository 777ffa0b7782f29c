// SPDX-License-Identifier: Apache-2.0
// Patterns of tokenizer.json are written for Oniguruma, and we match with PCRE2. Most syntax means the same to both.
#pragma once

#include <string>
#include <string_view>

namespace treeattn::model {

// The pattern of ByteLevel with use_regex.
inline constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// The pattern for PCRE2 (UTF and UCP) that means what `pattern` means to Oniguruma. Takes the syntax that means the
// same to both, and \s and \S, which it spells out. Throws BadFile for all else, naming it; `name` stands for the file.
std::string pcre2_pattern(std::string_view pattern, const std::string& name);

}  // namespace treeattn::model
