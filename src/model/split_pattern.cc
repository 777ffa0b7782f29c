// SPDX-License-Identifier: Apache-2.0
#include "model/split_pattern.h"

#include <fmt/format.h>

#include <vector>

#include "base/file.h"
#include "model/json.h"

namespace treeattn::model {
namespace {

constexpr std::size_t kLongestPattern = 4096;
constexpr int kMostRepeats = 1000;

// White_Space of Unicode (is_white_space in utf8.h). To PCRE2, \s is U+180E as well, which is no space since Unicode
// 6.3. A range comes last, so that a following hyphen is a hyphen.
constexpr std::string_view kSpaces =
    R"(\x20\x85\xA0\x{1680}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}\x{2000}-\x{200A}\x09-\x0D)";

constexpr std::string_view kCategories[] = {"L",  "Ll", "Lm", "Lo", "Lt", "Lu", "M",  "Mc", "Me", "Mn", "N", "Nd",
                                            "Nl", "No", "P",  "Pc", "Pd", "Pe", "Pf", "Pi", "Po", "Ps", "S", "Sc",
                                            "Sk", "Sm", "So", "Z",  "Zl", "Zp", "Zs", "C",  "Cc", "Cf", "Co"};

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
char to_lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

class Translator {
 public:
  Translator(std::string_view pattern, const std::string& name) : pattern_(pattern), rest_(pattern), name_(name) {}

  std::string run() {
    if (pattern_.empty() || pattern_.size() > kLongestPattern) {
      refuse(fmt::format("{} bytes", pattern_.size()), fmt::format("1 to {} bytes", kLongestPattern));
    }
    while (!rest_.empty()) outside();
    return std::move(out_);
  }

 private:
  [[noreturn]] void refuse(std::string_view what, std::string_view accepted) const {
    base::throw_bad_file(name_,
                         fmt::format("the pattern \"{}\" has {}; accepted: {}", shown(pattern_), what, accepted));
  }
  [[noreturn]] void refuse_at_rest() const {
    refuse(fmt::format("\"{}\"", shown(rest_.substr(0, 4))),
           "what Oniguruma and PCRE2 read alike: literals, \\r \\n \\t \\f \\s \\S \\d \\D, \\p and \\P with a general "
           "category, classes without nesting, ( (?: (?i: (?= (?! (?<= (?<! (?>, |, and the quantifiers ? * + {m,n}");
  }

  char peek(std::size_t ahead = 0) const { return ahead < rest_.size() ? rest_[ahead] : '\0'; }
  void copy(std::size_t bytes) {
    out_ += rest_.substr(0, bytes);
    rest_.remove_prefix(bytes);
  }

  // One element that is not in a class.
  void outside() {
    switch (peek()) {
      case '\\':
        escape(false);
        return;
      case '[':
        character_class();
        return;
      case '(':
        open_group();
        return;
      case ')':
        if (caseless_.empty()) refuse_at_rest();
        caseless_.pop_back();
        copy(1);
        return;
      case '{':
        repeat();
        return;
      case '.':
      case '^':
      case '$':
      case ']':
      case '}':
        refuse_at_rest();
      default:
        literal(false);
    }
  }

  // To Oniguruma, "ss" without regard to case is U+00DF as well. Few such pairs are ASCII; others are not looked for.
  void literal(bool in_class) {
    if (!caseless_.empty() && caseless_.back()) {
      if (static_cast<unsigned char>(peek()) >= 0x80) refuse_at_rest();
      const char pair[] = {to_lower(peek()), to_lower(peek(1))};
      for (const std::string_view one : {"ss", "st", "ff", "fi", "fl"}) {
        if (!in_class && one == std::string_view(pair, 2)) refuse_at_rest();
      }
    }
    copy(1);
  }

  void open_group() {
    bool caseless = !caseless_.empty() && caseless_.back();
    std::size_t bytes = 1;
    if (peek(1) == '*') refuse_at_rest();  // a verb of PCRE2
    if (peek(1) == '?') {
      bytes = 0;
      for (const std::string_view opening : {"(?:", "(?i:", "(?=", "(?!", "(?<=", "(?<!", "(?>"}) {
        if (rest_.starts_with(opening)) bytes = opening.size();
      }
      if (bytes == 0) refuse_at_rest();
      caseless = caseless || rest_.starts_with("(?i:");
    }
    caseless_.push_back(caseless);
    copy(bytes);
  }

  int number(std::size_t& at) const {
    int value = 0;
    for (; is_digit(peek(at)) && value <= kMostRepeats; ++at) value = value * 10 + (peek(at) - '0');
    if (value > kMostRepeats) refuse("more repeats", fmt::format("at most {}", kMostRepeats));
    return value;
  }

  // {m}, {m,} or {m,n}. What may follow other quantifiers, ? and +, means different things after this one.
  void repeat() {
    std::size_t at = 1;
    if (!is_digit(peek(at))) refuse_at_rest();
    number(at);
    if (peek(at) == ',') number(++at);
    if (peek(at) != '}' || peek(at + 1) == '?' || peek(at + 1) == '+') refuse_at_rest();
    copy(at + 1);
  }

  // Whether a whole set of characters was put out.
  bool escape(bool in_class) {
    const char c = peek(1);
    if (c == 's' || (c == 'S' && !in_class)) {
      rest_.remove_prefix(2);
      out_ += in_class ? std::string(kSpaces) : fmt::format("[{}{}]", c == 'S' ? "^" : "", kSpaces);
      return true;
    }
    if (c == 'p' || c == 'P') {
      property();
      return true;
    }
    const bool set = c == 'd' || c == 'D';
    const bool same = set || c == 'r' || c == 'n' || c == 't' || c == 'f';
    const bool punctuation = c > ' ' && c <= '~' && !is_letter(c) && !is_digit(c);
    if (!same && !punctuation) refuse_at_rest();
    copy(2);
    return set;
  }

  void property() {
    const std::size_t close = rest_.substr(0, 6).find('}');
    if (peek(2) != '{' || close == std::string_view::npos) refuse_at_rest();
    const std::string_view category = rest_.substr(3, close - 3);
    bool known = false;
    for (const std::string_view one : kCategories) known = known || one == category;
    // Whether a caseless Lu is Ll too is told differently by different versions.
    const bool cased = category == "Lu" || category == "Ll" || category == "Lt";
    if (!known || (cased && !caseless_.empty() && caseless_.back())) refuse_at_rest();
    copy(close + 1);
  }

  void character_class() {
    copy(peek(1) == '^' ? 2 : 1);
    if (peek() == ']') refuse_at_rest();
    bool after_set = false, after_hyphen = false;
    for (bool first = true; peek() != ']'; first = false) {
      if (rest_.empty() || peek() == '[' || rest_.starts_with("&&")) refuse_at_rest();
      const bool hyphen = peek() == '-';
      if (hyphen && after_set && peek(1) != ']') refuse_at_rest();  // a range from a set
      const bool range = after_hyphen;
      after_set = false;
      if (peek() == '\\') {
        after_set = escape(true);
        if (after_set && range) refuse_at_rest();  // a range to a set
      } else {
        literal(true);
      }
      after_hyphen = hyphen && !first;
    }
    copy(1);
  }

  std::string_view pattern_;
  std::string_view rest_;
  const std::string& name_;
  std::string out_;
  std::vector<bool> caseless_;  // of the groups that are open
};

}  // namespace

std::string pcre2_pattern(std::string_view pattern, const std::string& name) { return Translator(pattern, name).run(); }

}  // namespace treeattn::model
