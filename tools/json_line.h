// SPDX-License-Identifier: Apache-2.0
// JSON on one line, and a number for it.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

namespace treeattn::tools {

// Names and files that the user gave may be in another encoding: what is not UTF-8 becomes U+FFFD.
template <typename Json>
std::string json_line(const Json& value) {
  return value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

// Of what so many ranks have together: a whole number where it is one.
inline nlohmann::ordered_json per_rank(std::uint64_t all, int ranks) {
  const auto count = static_cast<std::uint64_t>(ranks);
  if (all % count == 0) return all / count;
  return static_cast<double>(all) / ranks;
}

}  // namespace treeattn::tools
