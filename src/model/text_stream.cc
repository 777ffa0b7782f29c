// SPDX-License-Identifier: Apache-2.0
#include "model/tokenizer.h"
#include "model/utf8.h"

namespace treeattn::model {
namespace {

// Takes the text from the front of `bytes`. A character that is cut at the end stays, unless it is the end of all.
std::string take_text(std::string& bytes, bool at_end) {
  std::string text;
  std::size_t at = 0;
  while (at < bytes.size()) {
    const std::string_view rest = std::string_view(bytes).substr(at);
    const Utf8Step step = next_utf8(rest);
    if (step.kind == Utf8Step::kCut && !at_end) break;
    text += step.kind == Utf8Step::kCharacter ? rest.substr(0, step.bytes) : kReplacementCharacter;
    at += step.bytes;
  }
  bytes.erase(0, at);
  return text;
}

}  // namespace

TextStream::TextStream(const Tokenizer& tokenizer, std::span<const std::int32_t> before) : tokenizer_(&tokenizer) {
  constexpr std::size_t kLongestCut = 3;  // bytes of a character without its last one
  for (std::size_t at = before.size(); at > 0 && waiting_.size() < kLongestCut; --at) {
    waiting_.insert(0, tokenizer.decode(before.subspan(at - 1, 1)));
  }
  take_text(waiting_, false);
}

std::string TextStream::next(std::int32_t token) {
  waiting_ += tokenizer_->decode(std::span(&token, 1));
  return take_text(waiting_, false);
}

std::string TextStream::finish() { return take_text(waiting_, true); }

}  // namespace treeattn::model
