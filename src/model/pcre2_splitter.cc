// SPDX-License-Identifier: Apache-2.0
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <new>

#include "base/file.h"
#include "model/json.h"
#include "model/split_pattern.h"
#include "model/splitter.h"

namespace treeattn::model {
namespace {

// What PCRE2 makes is freed by a function of its own.
template <auto free>
struct Free {
  template <class T>
  void operator()(T* pointer) const {
    free(pointer);
  }
};
using Code = std::unique_ptr<pcre2_code, Free<pcre2_code_free>>;
using MatchData = std::unique_ptr<pcre2_match_data, Free<pcre2_match_data_free>>;
using MatchContext = std::unique_ptr<pcre2_match_context, Free<pcre2_match_context_free>>;

std::string error_text(int code) {
  PCRE2_UCHAR text[128] = {};
  pcre2_get_error_message(code, text, sizeof text);
  return reinterpret_cast<const char*>(text);
}

class Pcre2Splitter : public Splitter {
 public:
  Pcre2Splitter(std::string_view pattern, const std::string& name) : pattern_(shown(pattern)), name_(name) {
    const std::string translated = pcre2_pattern(pattern, name);
    int error = 0;
    std::size_t at = 0;
    code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                              PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &error, &at, nullptr));
    if (code_ == nullptr) refuse(error_text(error));
    std::uint32_t empty = 0;
    pcre2_pattern_info(code_.get(), PCRE2_INFO_MATCHEMPTY, &empty);
    if (empty != 0) refuse("it can match nothing at all");
    // Where there is no compiler for the processor the interpreter matches, to the same end.
    pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE);
  }

  void split(std::string_view text, std::vector<std::string_view>& pieces) const override {
    const MatchData found(pcre2_match_data_create(1, nullptr));
    const MatchContext limits(pcre2_match_context_create(nullptr));
    if (found == nullptr || limits == nullptr) throw std::bad_alloc();
    // The patterns of tokenizers need a few steps a byte; those made to never end are stopped.
    constexpr std::size_t kSteps = 100'000, kStepsPerByte = 16, kMost = 1u << 31;
    pcre2_set_match_limit(limits.get(),
                          static_cast<std::uint32_t>(std::min(kMost, kSteps + kStepsPerByte * text.size())));
    std::size_t at = 0;  // the end of the last match
    while (at < text.size()) {
      if (!find(text, at, found.get(), limits.get())) break;
      const std::size_t* match = pcre2_get_ovector_pointer(found.get());
      if (match[0] < at || match[1] <= match[0]) refuse("a match that does not move on");
      if (match[0] > at) pieces.push_back(text.substr(at, match[0] - at));
      pieces.push_back(text.substr(match[0], match[1] - match[0]));
      at = match[1];
    }
    if (at < text.size()) pieces.push_back(text.substr(at));
  }

 private:
  [[noreturn]] void refuse(std::string_view reason) const {
    base::throw_bad_file(name_, fmt::format("the pattern \"{}\" cannot be used: {}", pattern_, reason));
  }

  bool find(std::string_view text, std::size_t at, pcre2_match_data* found, pcre2_match_context* limits) const {
    const auto match = [&](std::uint32_t options) {
      return pcre2_match(code_.get(), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), at, options, found,
                         limits);
    };
    int status = match(PCRE2_NO_UTF_CHECK);
    if (status == PCRE2_ERROR_JIT_STACKLIMIT) status = match(PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT);
    if (status == PCRE2_ERROR_NOMATCH) return false;
    if (status < 0) refuse(error_text(status));
    return true;
  }

  std::string pattern_;
  std::string name_;
  Code code_;
};

}  // namespace

std::unique_ptr<Splitter> make_splitter(std::string_view pattern, const std::string& name) {
  return std::make_unique<Pcre2Splitter>(pattern, name);
}

bool splitter_available() { return true; }

}  // namespace treeattn::model
