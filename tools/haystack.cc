// SPDX-License-Identifier: Apache-2.0
#include "haystack.h"

#include <fmt/format.h>

#include <numeric>
#include <sstream>
#include <utility>

#include "base/check.h"
#include "files.h"
#include "treeattn/error.h"

namespace treeattn::tools {

std::uint64_t HaystackRandom::below(std::uint64_t n) {
  state_ = state_ * 6364136223846793005u + 1442695040888963407u;
  return (state_ >> 33) % n;
}

HaystackOrder haystack_order(std::span<const std::int64_t> lengths, std::int64_t tokens, int depth_percent,
                             std::uint64_t seed) {
  HaystackRandom random(seed);
  std::vector<std::size_t> pack(lengths.size());
  std::iota(pack.begin(), pack.end(), std::size_t{0});
  HaystackOrder out;
  std::int64_t used = 0;
  while (true) {
    for (std::size_t i = pack.size() - 1; i > 0; --i) std::swap(pack[i], pack[random.below(i + 1)]);
    for (const std::size_t paragraph : pack) {
      if (used + lengths[paragraph] > tokens) {
        out.before_needle = out.paragraphs.size() * static_cast<std::size_t>(depth_percent) / 100;
        return out;
      }
      out.paragraphs.push_back(paragraph);
      used += lengths[paragraph];
    }
  }
}

int pass_key(std::uint64_t seed) { return 10000 + static_cast<int>(HaystackRandom(seed ^ 0x5EED).below(90000)); }

std::vector<std::string> read_paragraphs(const std::filesystem::path& file) {
  std::istringstream in(read_text(file));
  std::vector<std::string> out;
  for (std::string line; std::getline(in, line);) {
    if (!line.empty()) out.push_back(line);
  }
  if (out.empty()) throw BadFile(fmt::format("{} has no paragraph", file.string()));
  return out;
}

Haystack make_haystack(std::span<const std::string> paragraphs, const Encode& encode,
                       std::span<const std::int32_t> begin, std::int64_t tokens, int depth_percent,
                       std::uint64_t seed) {
  base::require(depth_percent >= 0 && depth_percent <= 100, "the depth is {} %; accepted: 0 to 100", depth_percent);
  Haystack out;
  out.key = pass_key(seed);
  const std::vector<std::int32_t> needle = encode(fmt::format("The pass key is {}. Remember it.\n\n", out.key));
  const std::vector<std::int32_t> question = encode("What is the pass key? The pass key is");
  const auto fixed = static_cast<std::int64_t>(begin.size() + needle.size() + question.size());
  base::require(tokens >= fixed, "{} tokens; accepted: at least {}, for the pass key and the question", tokens, fixed);
  std::vector<std::vector<std::int32_t>> encoded;
  std::vector<std::int64_t> lengths;
  for (const std::string& paragraph : paragraphs) {
    encoded.push_back(encode(paragraph + "\n\n"));
    lengths.push_back(static_cast<std::int64_t>(encoded.back().size()));
  }
  const HaystackOrder order = haystack_order(lengths, tokens - fixed, depth_percent, seed);
  const auto add = [&](std::span<const std::int32_t> more) {
    out.tokens.insert(out.tokens.end(), more.begin(), more.end());
  };
  add(begin);
  for (std::size_t i = 0; i <= order.paragraphs.size(); ++i) {
    if (i == order.before_needle) {
      out.needle_first = static_cast<std::int64_t>(out.tokens.size());
      add(needle);
      out.needle_end = static_cast<std::int64_t>(out.tokens.size());
    }
    if (i < order.paragraphs.size()) add(encoded[order.paragraphs[i]]);
  }
  add(question);
  return out;
}

}  // namespace treeattn::tools
