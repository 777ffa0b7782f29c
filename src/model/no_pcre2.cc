// SPDX-License-Identifier: Apache-2.0
#include "model/splitter.h"
#include "treeattn/error.h"

namespace treeattn::model {

std::unique_ptr<Splitter> make_splitter(std::string_view, const std::string& name) {
  throw Unavailable(name +
                    ": tokenizers need regular expressions, and this build has no PCRE2; accepted: a build with "
                    "TREEATTN_PCRE2=ON (Debian package: libpcre2-dev)");
}

bool splitter_available() { return false; }

}  // namespace treeattn::model
