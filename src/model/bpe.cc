// SPDX-License-Identifier: Apache-2.0
#include "model/bpe.h"

#include <algorithm>
#include <cstddef>
#include <queue>
#include <tuple>

namespace treeattn::model {
namespace {

constexpr std::int32_t kNone = -1;  // no place

// A piece of the word. Merged into the one before it, it has no token.
struct Symbol {
  std::int32_t token;
  std::int32_t before;  // places in the word, or kNone
  std::int32_t after;
};

// `merged` was the result of merging what stood at `place` and after it when this was queued.
struct PossibleMerge {
  std::int32_t rank;
  std::int32_t place;
  std::int32_t merged;
  // The smallest rank first, and of those the leftmost: a priority_queue puts the greatest on top.
  bool operator<(const PossibleMerge& other) const { return std::tie(rank, place) > std::tie(other.rank, other.place); }
};

}  // namespace

Bpe::Bpe(const ByteTokens& byte_tokens, std::span<const BpeMerge> merges, std::int64_t vocab)
    : byte_tokens_(byte_tokens), first_rule_(static_cast<std::size_t>(vocab) + 1) {
  std::vector<std::int32_t> order(merges.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int32_t>(i);
  const auto pair = [&](std::int32_t i) {
    const BpeMerge& merge = merges[static_cast<std::size_t>(i)];
    return std::pair(merge.left, merge.right);
  };
  std::sort(order.begin(), order.end(),
            [&](std::int32_t a, std::int32_t b) { return std::pair(pair(a), b) < std::pair(pair(b), a); });
  order.erase(
      std::unique(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) { return pair(a) == pair(b); }),
      order.end());
  rules_.reserve(order.size());
  for (const std::int32_t rank : order) {
    const BpeMerge& merge = merges[static_cast<std::size_t>(rank)];
    rules_.push_back({merge.right, rank, merge.merged});
    ++first_rule_[static_cast<std::size_t>(merge.left) + 1];
  }
  for (std::size_t i = 1; i < first_rule_.size(); ++i) first_rule_[i] += first_rule_[i - 1];
}

const Bpe::Rule* Bpe::find(std::int32_t left, std::int32_t right) const {
  const Rule* begin = rules_.data() + first_rule_[static_cast<std::size_t>(left)];
  const Rule* end = rules_.data() + first_rule_[static_cast<std::size_t>(left) + 1];
  const Rule* rule =
      std::lower_bound(begin, end, right, [](const Rule& one, std::int32_t wanted) { return one.right < wanted; });
  return rule != end && rule->right == right ? rule : nullptr;
}

void Bpe::encode(std::string_view word, std::vector<std::int32_t>& tokens) const {
  std::vector<Symbol> symbols;
  symbols.reserve(word.size());
  std::int32_t size = 0;
  for (const char byte : word) {
    const std::int32_t token = byte_tokens_[static_cast<unsigned char>(byte)];
    if (token == kNoToken) continue;
    symbols.push_back({token, size - 1, size + 1});
    ++size;
  }
  if (size > 0) symbols.back().after = kNone;
  const auto at = [&](std::int32_t place) -> Symbol& { return symbols[static_cast<std::size_t>(place)]; };

  std::vector<PossibleMerge> candidates;
  for (std::int32_t i = 0; i + 1 < size; ++i) {
    if (const Rule* rule = find(at(i).token, at(i + 1).token)) candidates.push_back({rule->rank, i, rule->merged});
  }
  std::priority_queue<PossibleMerge> queue({}, std::move(candidates));
  const auto consider = [&](std::int32_t place) {
    if (place == kNone || at(place).after == kNone) return;
    if (const Rule* rule = find(at(place).token, at(at(place).after).token)) {
      queue.push({rule->rank, place, rule->merged});
    }
  };

  while (!queue.empty()) {
    const PossibleMerge best = queue.top();
    queue.pop();
    Symbol& left = at(best.place);
    if (left.token == kNoToken || left.after == kNone) continue;
    // What stands here may have changed since. As in the tokenizers package, it is the result that must be the same,
    // not the pair.
    const Rule* rule = find(left.token, at(left.after).token);
    if (rule == nullptr || rule->merged != best.merged) continue;
    Symbol& right = at(left.after);
    left.token = best.merged;
    left.after = right.after;
    right.token = kNoToken;
    if (left.after != kNone) at(left.after).before = best.place;
    consider(left.before);
    consider(best.place);
  }
  for (const Symbol& symbol : symbols) {
    if (symbol.token != kNoToken) tokens.push_back(symbol.token);
  }
}

}  // namespace treeattn::model
