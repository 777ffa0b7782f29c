// SPDX-License-Identifier: Apache-2.0
// What a rank says of itself when it connects over TCP, and what rank 0 says of all. It goes over the wire as it lies
// in memory. Anybody may knock at the port, so nothing of a card is used before is_sound().
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace treeattn::comm {

static_assert(std::endian::native == std::endian::little, "ranks read each other's numbers as they lie in memory");

// How a card begins in every version, so that ranks of two versions can tell each other.
struct TcpGreeting {
  static constexpr std::uint32_t kMagic = 0x54726565;  // "Tree"; it was "tree" before there were versions
  // To be raised with every change of what ranks send each other: cards, headers, notes, and the messages of any call;
  // and in tests/fuzz/corpus/card.
  static constexpr std::uint32_t kVersion = 5;

  std::uint32_t magic = kMagic;
  std::uint32_t version = kVersion;
};

// A text with zeros behind it.
using TcpText = std::array<char, 64>;

struct TcpCard {
  TcpGreeting greeting;
  TcpText job{};  // here in every version from 2 on: a greeting and a job are enough to refuse somebody
  std::int32_t rank = 0;
  std::int32_t size = 0;
  std::int32_t port = 0;  // that it listens on
  TcpText address{};      // as rank 0 sees it; empty: on the machine of rank 0
  TcpText machine{};
};
static_assert(sizeof(TcpCard) == 212, "another layout is another version");
// What one who refuses another for its job says: so much of its own card.
inline constexpr std::size_t kTcpRefusalBytes = offsetof(TcpCard, rank);
static_assert(kTcpRefusalBytes == sizeof(TcpGreeting) + sizeof(TcpText));

// Whether the greeting is that of a rank which would misread what this one sends.
bool is_of_other_version(const TcpGreeting& greeting);

// Whether the bytes are a card of this version at all: its port is one, and its texts end. Of which group it is, the
// reader asks.
bool is_sound(const TcpCard& card);

// The text and zeros behind it; what is too long is cut.
void put_text(TcpText& field, std::string_view text);
// The same; of what is too long, and of what a terminal would not show, a checksum of all tells it from others.
void put_job(TcpText& field, std::string_view job);
// As it is shown: 'job "a"', or 'no job'. Anybody may have written it.
std::string name_job(const TcpText& job);

}  // namespace treeattn::comm
