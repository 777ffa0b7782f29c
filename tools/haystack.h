// SPDX-License-Identifier: Apache-2.0
// A long text with a pass key hidden in it: the haystack of tools/demo_model/README.md, number for number.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace treeattn::tools {

// The random numbers of a haystack: 64-bit integers only, so that any language draws the same ones.
class HaystackRandom {
 public:
  explicit HaystackRandom(std::uint64_t seed) : state_(seed) {}
  std::uint64_t below(std::uint64_t n);

 private:
  std::uint64_t state_;
};

// The order of paragraphs, by number, and how many of them come before the needle.
struct HaystackOrder {
  std::vector<std::size_t> paragraphs;
  std::size_t before_needle = 0;
};

// lengths: tokens of each paragraph; tokens: at most so many altogether; depth_percent: 0 to 100. Requires a paragraph
// that is not empty.
HaystackOrder haystack_order(std::span<const std::int64_t> lengths, std::int64_t tokens, int depth_percent,
                             std::uint64_t seed);
// Five digits.
int pass_key(std::uint64_t seed);

// The paragraphs of a file: its lines that are not empty. Throws BadFile.
std::vector<std::string> read_paragraphs(const std::filesystem::path& file);

struct Haystack {
  std::vector<std::int32_t> tokens;  // the whole prompt
  std::int64_t needle_first = 0, needle_end = 0;
  int key = 0;
};

using Encode = std::function<std::vector<std::int32_t>(std::string_view)>;

// A prompt of at most `tokens` tokens: `begin`, paragraphs with the needle between them, the question. Throws
// InvalidArgument when not even needle and question fit.
Haystack make_haystack(std::span<const std::string> paragraphs, const Encode& encode,
                       std::span<const std::int32_t> begin, std::int64_t tokens, int depth_percent, std::uint64_t seed);

}  // namespace treeattn::tools
