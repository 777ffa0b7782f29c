// SPDX-License-Identifier: Apache-2.0
// Byte pair encoding of one word: bytes become tokens, and neighbours are merged, the best rank first.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace treeattn::model {

struct BpeMerge {
  std::int32_t left = 0;
  std::int32_t right = 0;
  std::int32_t merged = 0;
};

// The token of each byte; kNoToken for a byte that is left out.
using ByteTokens = std::array<std::int32_t, 256>;
inline constexpr std::int32_t kNoToken = -1;

class Bpe {
 public:
  // `merges` in the order of their rank. Of two with the same pair the later counts. Requires tokens in [0, vocab).
  Bpe(const ByteTokens& byte_tokens, std::span<const BpeMerge> merges, std::int64_t vocab);

  // Appends the tokens of a word of less than 2^31 bytes. Takes time n log n of its n bytes.
  void encode(std::string_view word, std::vector<std::int32_t>& tokens) const;

 private:
  struct Rule {
    std::int32_t right;
    std::int32_t rank;
    std::int32_t merged;
  };
  const Rule* find(std::int32_t left, std::int32_t right) const;

  ByteTokens byte_tokens_;
  std::vector<Rule> rules_;              // by left, then by right
  std::vector<std::size_t> first_rule_;  // [vocab + 1]: the rules of one left token lie between two of these
};

}  // namespace treeattn::model
