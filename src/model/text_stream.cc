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

std::string TextStream::next(std::int32_t token) {
  waiting_ += tokenizer_->decode(std::span(&token, 1));
  return take_text(waiting_, false);
}

std::string TextStream::finish() { return take_text(waiting_, true); }

}  // namespace treeattn::model
