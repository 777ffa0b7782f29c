// SPDX-License-Identifier: Apache-2.0
// What a rank says of itself when it connects over TCP, and what rank 0 says of all. It goes over the wire as it lies
// in memory. Anybody may knock at the port, so nothing of a card is used before is_sound().
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <string_view>

namespace treeattn::comm {

static_assert(std::endian::native == std::endian::little, "ranks read each other's numbers as they lie in memory");

// How a card begins in every version, so that ranks of two versions can tell each other.
struct TcpGreeting {
  static constexpr std::uint32_t kMagic = 0x54726565;  // "Tree"; it was "tree" before there were versions
  // To be raised with every change of what ranks send each other: cards, headers, notes, and the messages of any call.
  static constexpr std::uint32_t kVersion = 1;

  std::uint32_t magic = kMagic;
  std::uint32_t version = kVersion;
};

struct TcpCard {
  TcpGreeting greeting;
  std::int32_t rank = 0;
  std::int32_t size = 0;
  std::int32_t port = 0;           // that it listens on
  std::array<char, 64> address{};  // as rank 0 sees it; empty: on the machine of rank 0
  std::array<char, 64> machine{};
};
static_assert(sizeof(TcpCard) == 148, "another layout is another version");

// Whether the greeting is that of a rank which would misread what this one sends.
bool is_of_other_version(const TcpGreeting& greeting);

// Whether the bytes are a card of this version at all: its port is one, and its texts end. Of which group it is, the
// reader asks.
bool is_sound(const TcpCard& card);

// The text and zeros behind it; what is too long is cut.
void put_text(std::array<char, 64>& field, std::string_view text);

}  // namespace treeattn::comm
