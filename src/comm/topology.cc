// SPDX-License-Identifier: Apache-2.0
#include "comm/topology.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <map>

#include "base/check.h"

namespace treeattn::comm {

std::vector<int> number_nodes(const std::vector<int>& nodes) {
  std::map<int, int> number;
  std::vector<int> out;
  out.reserve(nodes.size());
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    // Mostly the same: a simulator does this for each of thousands of ranks.
    const bool again = i > 0 && nodes[i] == nodes[i - 1];
    out.push_back(again ? out.back() : number.try_emplace(nodes[i], static_cast<int>(number.size())).first->second);
  }
  return out;
}

std::vector<int> parse_nodes(std::string_view text, int ranks) {
  std::vector<int> out;
  const char* at = text.data();
  const char* const end = at + text.size();
  bool good = true;
  while (good) {
    int node = -1;
    const auto [next, error] = std::from_chars(at, end, node);
    good = error == std::errc() && node >= 0 && (next == end || *next == ',');
    out.push_back(node);
    if (next == end) break;
    at = next + 1;
  }
  base::require(good && out.size() == static_cast<std::size_t>(ranks),
                "TREEATTN_NODES = \"{}\"; accepted: {} whole numbers of at least 0 with commas between them, the node "
                "of each rank",
                text, ranks);
  return out;
}

std::vector<int> choose_nodes(const std::vector<int>& asked, const std::vector<int>& found) {
  if (!asked.empty()) {
    base::require(asked.size() == found.size(), "nodes of {} ranks; accepted: one for each of the {} ranks, or none",
                  asked.size(), found.size());
    for (const int node : asked) {
      base::require(node >= 0, "nodes has a {}; accepted: whole numbers of at least 0", node);
    }
    return number_nodes(asked);
  }
  if (const char* text = std::getenv("TREEATTN_NODES"); text != nullptr && *text != '\0') {
    return number_nodes(parse_nodes(text, static_cast<int>(found.size())));
  }
  return number_nodes(found);
}

std::vector<std::vector<int>> cut_processors(const std::vector<int>& processors, int ranks) {
  const std::size_t count = processors.size();
  const auto pieces = static_cast<std::size_t>(ranks);
  std::vector<std::vector<int>> out(pieces);
  for (std::size_t rank = 0; rank < pieces; ++rank) {
    const std::size_t first = rank * count / pieces;
    const std::size_t last = std::max(first + 1, (rank + 1) * count / pieces);
    out[rank].assign(processors.begin() + static_cast<std::ptrdiff_t>(first),
                     processors.begin() + static_cast<std::ptrdiff_t>(last));
  }
  return out;
}

}  // namespace treeattn::comm
