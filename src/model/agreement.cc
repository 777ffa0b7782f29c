// SPDX-License-Identifier: Apache-2.0
#include "model/agreement.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <map>
#include <vector>

#include "parallel/agree.h"
#include "treeattn/error.h"

namespace treeattn::model {

std::uint64_t digest_of(std::span<const float> values, std::uint64_t seed) {
  std::uint64_t hash = 0xcbf29ce484222325ull ^ seed;
  const std::span<const std::byte> bytes = std::as_bytes(values);
  for (std::size_t i = 0; i < bytes.size(); i += sizeof(hash)) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + i, std::min(sizeof(word), bytes.size() - i));
    hash = (hash ^ word) * 0x9e3779b97f4a7c15ull;
    hash ^= hash >> 32;
  }
  return hash;
}

bool require_agreement(Communicator& communicator, const std::function<std::uint64_t()>& digest, const char* what,
                       bool flag) {
  if (communicator.size() == 1) return flag;
  struct Opinion {
    std::uint64_t digest, flag;
  };
  const std::vector<Opinion> all = parallel::gathered(communicator, Opinion{digest(), flag ? 1u : 0u});
  std::map<std::uint64_t, int> votes;
  for (const Opinion& one : all) {
    ++votes[one.digest];
    flag = flag || one.flag != 0;
  }
  if (votes.size() == 1) return flag;
  const auto fewer = [](const auto& a, const auto& b) { return a.second < b.second; };
  const std::uint64_t usual = std::max_element(votes.begin(), votes.end(), fewer)->first;
  std::vector<std::size_t> others;
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].digest != usual) others.push_back(r);
  }
  throw Error(fmt::format("the ranks do not agree on {}: rank {} of {} has other bits than the rest", what,
                          fmt::join(others, ", "), all.size()));
}

}  // namespace treeattn::model
