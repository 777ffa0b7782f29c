// SPDX-License-Identifier: Apache-2.0
// What stands before every message over TCP. It goes over the wire as it lies in memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace treeattn::comm {

struct TcpHeader {
  static constexpr std::int32_t kNote = -1;  // in the place of a tag
  // More than any machine holds.
  static constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 48;

  std::int32_t tag = 0;
  std::uint32_t given_up = 0;  // 1: before it had begun. It keeps its place, so that nothing sent later is taken for it
  std::uint64_t bytes = 0;
};
static_assert(sizeof(TcpHeader) == 16, "another layout is another TcpGreeting::kVersion");

// Of what rank `from` has sent: throws Error, which names it, where no rank sends that. What is announced may still
// never come.
void check_header(int from, const TcpHeader& header);

}  // namespace treeattn::comm
