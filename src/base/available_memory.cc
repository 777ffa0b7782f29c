// SPDX-License-Identifier: Apache-2.0
#include "base/available_memory.h"

#include <algorithm>
#include <limits>
#include <string_view>

namespace treeattn::base {
namespace {

// More than there are bytes, where nothing limits them.
constexpr std::size_t kNoLimit = std::numeric_limits<std::size_t>::max();

// What a limit of this process leaves, where `used` of /proc/self/status counts against it.
std::size_t limit_room(std::string_view limit_name, std::string_view used, const TextOf& text_of) {
  const auto limit = number_after(limit_name, text_of("/proc/self/limits"));
  if (!limit) return kNoLimit;
  return *limit - std::min(*limit, number_after(used, text_of("/proc/self/status")).value_or(0) << 10);
}

std::size_t address_room(const TextOf& text_of) { return limit_room("Max address space ", "VmSize:", text_of); }

// Memory that can be written and is nobody else's: what is mapped to be read only, or reserved, does not count.
std::size_t data_room(const TextOf& text_of) { return limit_room("Max data size ", "VmData:", text_of); }

}  // namespace

std::optional<std::size_t> available_memory(const TextOf& text_of) {
  const auto kilobytes = number_after("MemAvailable:", text_of("/proc/meminfo"));
  const std::size_t in_machine = kilobytes ? *kilobytes << 10 : kNoLimit;
  const std::size_t room =
      std::min({in_machine, control_group_room(text_of), address_room(text_of), data_room(text_of)});
  return room == kNoLimit ? std::nullopt : std::optional(room);
}

std::optional<std::size_t> available_memory() { return available_memory(text_of_file); }

std::size_t available_addresses() { return address_room(text_of_file); }

}  // namespace treeattn::base
