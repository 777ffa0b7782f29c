// SPDX-License-Identifier: Apache-2.0
// JSON on one line.
#pragma once

#include <string>

namespace treeattn::tools {

// Names and files that the user gave may be in another encoding: what is not UTF-8 becomes U+FFFD.
template <typename Json>
std::string json_line(const Json& value) {
  return value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace treeattn::tools
