// SPDX-License-Identifier: Apache-2.0
#include "model/added_tokens.h"

#include <algorithm>
#include <utility>

#include "model/utf8.h"

namespace treeattn::model {

void AddedTokens::Table::make() {
  std::sort(tokens.begin(), tokens.end(), [](const AddedToken& a, const AddedToken& b) { return a.text < b.text; });
  first.assign(257, 0);
  for (const AddedToken& token : tokens) ++first[static_cast<unsigned char>(token.text[0]) + std::size_t{1}];
  for (std::size_t i = 1; i < first.size(); ++i) first[i] += first[i - 1];
}

const AddedToken* AddedTokens::Table::longest_at(std::string_view text) const {
  const std::size_t byte = static_cast<unsigned char>(text[0]);
  auto begin = tokens.begin() + static_cast<std::ptrdiff_t>(first[byte]);
  auto end = tokens.begin() + static_cast<std::ptrdiff_t>(first[byte + 1]);
  const AddedToken* longest = nullptr;
  // Those in [begin, end) agree with the text in the first `length` bytes; one that has no more of them comes first.
  for (std::size_t length = 1; begin != end; ++length) {
    if (begin->text.size() == length) {
      longest = &*begin;
      ++begin;
    }
    if (length == text.size()) break;
    const auto next = static_cast<unsigned char>(text[length]);
    const auto at = [length](const AddedToken& token) { return static_cast<unsigned char>(token.text[length]); };
    begin = std::partition_point(begin, end, [&](const AddedToken& token) { return at(token) < next; });
    end = std::partition_point(begin, end, [&](const AddedToken& token) { return at(token) == next; });
  }
  return longest;
}

void AddedTokens::Table::split(std::string_view text, bool special, std::vector<TextPart>& parts) const {
  if (tokens.empty()) {
    if (!text.empty()) parts.push_back({text, {}});
    return;
  }
  std::size_t taken = 0;  // up to here the text is in `parts`
  for (std::size_t at = 0; at < text.size();) {
    const AddedToken* token = longest_at(text.substr(at));
    if (token == nullptr) {
      ++at;
      continue;
    }
    std::size_t begin = at, end = at + token->text.size();
    at = end;
    if (token->special && !special) continue;
    if (token->strip_before) begin = taken + space_at_end(text.substr(taken, begin - taken));
    if (token->strip_after) end += space_at_begin(text.substr(end));
    if (taken < begin) parts.push_back({text.substr(taken, begin - taken), {}});
    parts.push_back({text.substr(begin, end - begin), token->id});
    taken = end;
  }
  if (taken < text.size()) parts.push_back({text.substr(taken), {}});
}

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) {
  for (AddedToken& token : tokens) (token.normalized ? normalized_ : plain_).tokens.push_back(std::move(token));
  plain_.make();
  normalized_.make();
}

std::vector<TextPart> AddedTokens::split(std::string_view text, bool special) const {
  std::vector<TextPart> first, second;
  plain_.split(text, special, first);
  if (normalized_.tokens.empty()) return first;
  for (const TextPart& part : first) {
    if (part.token) {
      second.push_back(part);
    } else {
      normalized_.split(part.text, special, second);
    }
  }
  return second;
}

const AddedToken* AddedTokens::find(std::string_view text) const {
  for (const Table* table : {&plain_, &normalized_}) {
    const auto found =
        std::lower_bound(table->tokens.begin(), table->tokens.end(), text,
                         [](const AddedToken& token, std::string_view wanted) { return token.text < wanted; });
    if (found != table->tokens.end() && found->text == text) return &*found;
  }
  return nullptr;
}

}  // namespace treeattn::model
