// SPDX-License-Identifier: Apache-2.0
// The patterns that cut text into words: which are taken, and what they cut.
#include "model/split_pattern.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include "model/splitter.h"
#include "model_files.h"
#include "needs_pcre2.h"

namespace treeattn {
namespace {

using namespace model;
using namespace testing_model;

std::vector<std::string> pieces(const char* pattern, std::string_view text) {
  std::vector<std::string_view> found;
  make_splitter(pattern, "p")->split(text, found);
  return {found.begin(), found.end()};
}

TEST(Splitter, Llama3) {
  NEEDS_PCRE2();
  using Pieces = std::vector<std::string>;
  EXPECT_EQ(pieces(kLlama3Pattern, "I'LL say  'hello' 12345\r\n\n x"),
            (Pieces{"I", "'LL", " say", " ", " '", "hello", "'", " ", "123", "45", "\r\n\n", " x"}));
  EXPECT_EQ(pieces(kLlama3Pattern, "a   b\t\n  "), (Pieces{"a", "  ", " b", "\t\n", "  "}));
  EXPECT_EQ(pieces(kLlama3Pattern, "e\u0301 שָׁ"), (Pieces{"e", "\u0301", " ש", "ָׁ"}));
  EXPECT_EQ(pieces(kLlama3Pattern, "a\u180e\u180eb"), (Pieces{"a", "\u180e\u180e", "b"}));  // no space since 6.3
  EXPECT_EQ(pieces(kLlama3Pattern, "it'\u017fx"), (Pieces{"it", "'\u017f", "x"}));          // a long s is an s
  EXPECT_EQ(pieces(std::string(kGpt2Pattern).c_str(), "we'LL 12345 don't"),
            (Pieces{"we", "'", "LL", " 12345", " don", "'t"}));
}

TEST(SplitPattern, TakesWhatBothReadAlike) {
  for (const char* pattern : {kLlama3Pattern, "a|b", R"(\p{Lu}+[^\s\P{L}\-\]]{2,})", "(?<=a)b(?!c)(?>d)", R"([-a\s-])",
                              "(a)++b*+c?+", "ss(?i:[st]'ll)"}) {
    EXPECT_NO_THROW(pcre2_pattern(pattern, "p")) << pattern;
  }
  EXPECT_EQ(pcre2_pattern("a+?b", "p"), "a+?b");
}

TEST(SplitPattern, RefusesTheRest) {
  for (const char* pattern : {"",
                              ".",
                              "^a",
                              "a$",
                              R"(\w)",
                              R"(\b)",
                              R"(\h)",
                              R"(\v)",
                              R"(\1)",
                              R"(\x41)",
                              R"(\u0041)",
                              R"(\Qa)",
                              R"(\pL)",
                              R"(\p{Han})",
                              R"(\p{^L})",
                              R"(\p{L)",
                              R"(\)",
                              "[[:alpha:]]",
                              "[a[b]]",
                              "[a&&b]",
                              "[]a]",
                              "[a",
                              "[^]",
                              R"([\S])",
                              R"([a-\s])",
                              R"([\s-a])",
                              R"([\p{L}-z])",
                              "(?i)a",
                              "(?<n>a)",
                              "(?m:a)",
                              "(*UCP)a",
                              "(?#x)",
                              "a{,3}",
                              "a{x}",
                              "a{2}?",
                              "a{2}+",
                              "a{2,3",
                              "a{100000}",
                              "a{99999999999999999999}",
                              "}",
                              "]",
                              "a)",
                              "(?i:\\p{Lu})",
                              "(?i:'sS)",
                              "(?i:stra(?:f|i))",
                              "(?i:\u00df)",
                              "(?i:[\u00df])"}) {
    expect_refused([&] { pcre2_pattern(pattern, "p"); }, {"p: the pattern", "accepted"});
  }
  expect_refused([&] { pcre2_pattern(std::string(5000, 'a'), "p"); }, {"5000 bytes"});
  NEEDS_PCRE2();
  for (const char* pattern : {"a*", "a|", "(?=a)", "(a", "*a", "[b-a]", "(?<=a+)b"}) {
    expect_refused([&] { make_splitter(pattern, "p"); }, {"p: the pattern", "cannot be used"});
  }
}

TEST(Splitter, StopsPatternsThatNeverEnd) {
  NEEDS_PCRE2();
  const auto splitter = make_splitter(R"((?:\p{L}+\p{L}+)+[01])", "p");
  std::vector<std::string_view> found;
  expect_refused([&] { splitter->split(std::string(3000, 'a'), found); }, {"cannot be used", "limit"});
}

}  // namespace
}  // namespace treeattn
