// SPDX-License-Identifier: Apache-2.0
// What a rank says of itself when it connects over TCP, and what rank 0 says of all. It goes over the wire as it lies
// in memory. Anybody may knock at the port, so nothing of a card is used before is_sound().
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace treeattn::comm {

struct TcpCard {
  static constexpr std::uint32_t kMagic = 0x74726565;  // "tree"

  std::uint32_t magic = kMagic;
  std::int32_t rank = 0;
  std::int32_t size = 0;
  std::int32_t port = 0;           // that it listens on
  std::array<char, 64> address{};  // as rank 0 sees it; empty: on the machine of rank 0
  std::array<char, 64> machine{};
};

// Whether the bytes are a card at all: its port is one, and its texts end. Of which group it is, the reader asks.
bool is_sound(const TcpCard& card);

// The text and zeros behind it; what is too long is cut.
void put_text(std::array<char, 64>& field, std::string_view text);

}  // namespace treeattn::comm
