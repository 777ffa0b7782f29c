// SPDX-License-Identifier: Apache-2.0
// Token ids as the files write them: one number or a list.
#pragma once

#include <cstdint>
#include <vector>

#include "model/json.h"

namespace treeattn::model {

// Each from 0 to `largest`. Throws BadFile.
inline std::vector<std::int32_t> read_token_ids(const JsonNode& node, std::int64_t largest) {
  constexpr std::size_t kMost = 64;
  std::vector<std::int32_t> ids;
  if (node.value().is_array()) {
    for (const JsonNode& id : node.elements(kMost)) ids.push_back(static_cast<std::int32_t>(id.integer(0, largest)));
  } else {
    ids.push_back(static_cast<std::int32_t>(node.integer(0, largest)));
  }
  return ids;
}

}  // namespace treeattn::model
