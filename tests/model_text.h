// SPDX-License-Identifier: Apache-2.0
// What a Llama said, for tests that compare it bit for bit.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace treeattn::testing_model {

// The tokens that come out, and the logits they were taken from.
struct Text {
  std::vector<std::int32_t> tokens;
  std::vector<std::vector<float>> logits;
};

inline std::int32_t largest(const std::vector<float>& logits) {
  return static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Where two texts part; empty if they do not.
inline std::string difference(const Text& a, const Text& b) {
  if (a.tokens.size() != b.tokens.size()) {
    return "lengths " + std::to_string(a.tokens.size()) + ", " + std::to_string(b.tokens.size());
  }
  for (std::size_t i = 0; i < a.tokens.size(); ++i) {
    if (!same_bits(a.logits[i], b.logits[i])) return "logits " + std::to_string(i);
    if (a.tokens[i] != b.tokens[i]) return "token " + std::to_string(i);
  }
  return {};
}

}  // namespace treeattn::testing_model
