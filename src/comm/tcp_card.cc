// SPDX-License-Identifier: Apache-2.0
#include "comm/tcp_card.h"

#include <algorithm>

namespace treeattn::comm {

bool is_of_other_version(const TcpGreeting& greeting) {
  return greeting.magic == TcpGreeting::kMagic && greeting.version != TcpGreeting::kVersion;
}

bool is_sound(const TcpCard& card) {
  const auto ends = [](const std::array<char, 64>& text) {
    return std::find(text.begin(), text.end(), '\0') != text.end();
  };
  return card.greeting.magic == TcpGreeting::kMagic && card.greeting.version == TcpGreeting::kVersion &&
         card.port >= 1 && card.port <= 65535 && ends(card.address) && ends(card.machine);
}

void put_text(std::array<char, 64>& field, std::string_view text) {
  field.fill('\0');
  text.copy(field.data(), field.size() - 1);
}

}  // namespace treeattn::comm
