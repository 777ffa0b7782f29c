// SPDX-License-Identifier: Apache-2.0
// Who is who among TCP ranks, by the variables that launchers set.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "treeattn/communicator.h"
#include "treeattn/error.h"

namespace treeattn {
namespace {

int number_from(const char* name, int least, int most) {
  const char* text = std::getenv(name);
  if (text == nullptr) {
    throw Unavailable(fmt::format(
        "tcp_communicator: {} is not set; accepted: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment",
        name));
  }
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  base::require(end != text && *end == '\0' && value >= least && value <= most, "{} = {}; accepted: {} to {}", name,
                text, least, most);
  return static_cast<int>(value);
}

// torchrun's own process may have the port that it tells its workers.
bool port_is_taken() {
  const char* text = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
  return text != nullptr && std::string_view(text) == "True";
}

}  // namespace

bool launched_by_tcp() {
  constexpr std::array kSigns{"RANK", "WORLD_SIZE", "MASTER_PORT"};
  return std::all_of(kSigns.begin(), kSigns.end(), [](const char* name) { return std::getenv(name) != nullptr; });
}

std::shared_ptr<Communicator> tcp_communicator(RankOptions options) {
  constexpr int kMostRanks = 1 << 20;
  TcpPlace place;
  place.size = number_from("WORLD_SIZE", 1, kMostRanks);
  place.rank = number_from("RANK", 0, place.size - 1);
  constexpr int kMostPort = 65535;
  place.port = number_from("MASTER_PORT", 1, kMostPort);
  if (port_is_taken()) place.port += place.port < kMostPort ? 1 : -1;
  if (const char* address = std::getenv("MASTER_ADDR")) place.address = address;
  return tcp_communicator(place, std::move(options));
}

}  // namespace treeattn
