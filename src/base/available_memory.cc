// SPDX-License-Identifier: Apache-2.0
#include "base/available_memory.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <limits>
#include <optional>
#include <sstream>
#include <string_view>

namespace treeattn::base {
namespace {

constexpr std::size_t kUnlimited = std::numeric_limits<std::size_t>::max();

// The number after `key` in the first line that begins with it. None where another word stands there.
std::optional<std::size_t> number_after(std::string_view key, const std::string& text) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with(key)) continue;
    std::istringstream in(line.substr(key.size()));
    std::size_t number = 0;
    return in >> number ? std::optional(number) : std::nullopt;
  }
  return {};
}

std::size_t left_of(std::size_t limit, std::size_t used) { return limit - std::min(limit, used); }

// A version of control groups.
struct GroupKind {
  std::string root;  // where it is mounted
  const char* limit;
  const char* used;
  const char* unneeded;  // in memory.stat, with all groups below: pages of files, which go when memory is needed
};

std::size_t group_room(const GroupKind& kind, const std::string& directory, const TextOf& text_of) {
  const auto limit = number_after("", text_of(directory + kind.limit));
  if (!limit) return kUnlimited;
  const std::size_t used = number_after("", text_of(directory + kind.used)).value_or(0);
  const std::size_t unneeded = number_after(kind.unneeded, text_of(directory + "/memory.stat")).value_or(0);
  return left_of(*limit, left_of(used, unneeded));
}

// Of this process's group and of all above it: each has a limit of its own. In a container the path may be that of the
// host, of which only the root is there.
std::size_t control_group_room(const TextOf& text_of) {
  static const GroupKind kVersion1{"/sys/fs/cgroup/memory", "/memory.limit_in_bytes", "/memory.usage_in_bytes",
                                   "total_inactive_file "};
  static const GroupKind kVersion2{"/sys/fs/cgroup", "/memory.max", "/memory.current", "inactive_file "};
  std::size_t room = kUnlimited;
  std::istringstream lines(text_of("/proc/self/cgroup"));
  for (std::string line; std::getline(lines, line);) {  // number:controllers:path
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool version2 = line.starts_with("0::");
    if (!version2 && controllers.find(",memory,") == std::string::npos) continue;
    const GroupKind& kind = version2 ? kVersion2 : kVersion1;
    for (std::string path = line.substr(second + 1);; path.erase(path.find_last_of('/'))) {
      room = std::min(room, group_room(kind, kind.root + path, text_of));
      if (path.find('/') == std::string::npos) break;
    }
  }
  return room;
}

std::size_t address_room(const TextOf& text_of) {
  const auto limit = number_after("Max address space ", text_of("/proc/self/limits"));
  if (!limit) return kUnlimited;
  return left_of(*limit, number_after("VmSize:", text_of("/proc/self/status")).value_or(0) << 10);
}

std::string text_of_file(const std::string& path) {
  std::ifstream file(path);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

}  // namespace

std::size_t available_memory(const TextOf& text_of) {
  const std::size_t in_machine = number_after("MemAvailable:", text_of("/proc/meminfo")).value_or(0) << 10;
  return std::min({in_machine, control_group_room(text_of), address_room(text_of)});
}

std::size_t available_memory() { return available_memory(text_of_file); }

std::size_t available_addresses() { return address_room(text_of_file); }

}  // namespace treeattn::base
