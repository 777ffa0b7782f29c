// SPDX-License-Identifier: Apache-2.0
// Text cut by a regular expression. PCRE2 does it; a build without it says so.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace treeattn::model {

class Splitter {
 public:
  virtual ~Splitter() = default;
  // Appends the matches in `text` and what lies between them, in order; none is empty, and together they are the text.
  // Requires UTF-8. May be called from several threads at once. Throws BadFile when a match takes more steps than any
  // sensible pattern needs.
  virtual void split(std::string_view text, std::vector<std::string_view>& pieces) const = 0;
};

// Of a pattern as tokenizer.json has it. Throws BadFile for one that is wrong, not supported, or matches nothing at
// all, and Unavailable in a build without PCRE2. `name` stands for the file.
std::unique_ptr<Splitter> make_splitter(std::string_view pattern, const std::string& name);

bool splitter_available();

}  // namespace treeattn::model
