// SPDX-License-Identifier: Apache-2.0
#include "parallel/agree.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

#include "base/check.h"
#include "treeattn/error.h"

namespace treeattn::parallel {

void throw_if_any_failed(Communicator& communicator, const std::string& failure) {
  const std::vector<std::uint8_t> failed = gathered<std::uint8_t>(communicator, failure.empty() ? 0 : 1);
  const auto first = std::find(failed.begin(), failed.end(), 1);
  if (first == failed.end()) return;
  const auto root = static_cast<int>(first - failed.begin());
  std::array<char, 1024> text{};  // zero at the end
  if (communicator.rank() == root) std::memcpy(text.data(), failure.data(), std::min(failure.size(), text.size() - 1));
  communicator.broadcast(std::as_writable_bytes(std::span(text)), root);
  if (!failure.empty()) throw BadFile(failure);
  throw BadFile(fmt::format("rank {}: {}", root, text.data()));
}

void require_same(Communicator& communicator, std::uint32_t digest, const char* what) {
  const std::vector<std::uint32_t> all = gathered(communicator, digest);
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    base::require(all[rank] == all[0], "rank {} has other {} than rank 0; accepted: the same calls on every rank", rank,
                  what);
  }
}

}  // namespace treeattn::parallel
