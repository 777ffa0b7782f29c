// SPDX-License-Identifier: Apache-2.0
#include "base/control_group.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <limits>
#include <sstream>

namespace treeattn::base {
namespace {

constexpr std::size_t kUnlimited = std::numeric_limits<std::size_t>::max();

// The first version has a tree of groups for each controller, the second has one for all.
enum class Version { k1, k2 };

// The least that a group of this controller leaves: the process's own, or one above it.
template <class Left>  // std::size_t left(version, directory)
std::size_t least_left(std::string_view controller, const TextOf& text_of, const Left& left) {
  std::size_t least = kUnlimited;
  std::istringstream lines(text_of("/proc/self/cgroup"));
  for (std::string line; std::getline(lines, line);) {  // number:controllers:path
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const Version version = line.starts_with("0::") ? Version::k2 : Version::k1;
    std::string root = "/sys/fs/cgroup";
    if (version == Version::k1) {
      if (controllers.find("," + std::string(controller) + ",") == std::string::npos) continue;
      root += "/" + std::string(controller);
    }
    for (std::string path = line.substr(second + 1);; path.erase(path.find_last_of('/'))) {
      least = std::min(least, left(version, root + path));
      if (path.find('/') == std::string::npos) break;
    }
  }
  return least;
}

}  // namespace

std::string text_of_file(const std::string& path) {
  std::ifstream file(path);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

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

std::size_t control_group_room(const TextOf& text_of) {
  return least_left("memory", text_of, [&](Version version, const std::string& directory) {
    const bool two = version == Version::k2;
    const auto number_in = [&](const char* file) { return number_after("", text_of(directory + file)); };
    std::size_t limit = number_in(two ? "/memory.max" : "/memory.limit_in_bytes").value_or(kUnlimited);
    // Who is above this is not ended, but held up until it is as good as stopped.
    if (two) limit = std::min(limit, number_in("/memory.high").value_or(kUnlimited));
    if (limit == kUnlimited) return limit;
    const std::size_t used = number_in(two ? "/memory.current" : "/memory.usage_in_bytes").value_or(0);
    // Pages of files go when memory is needed, those in use, too: a model that was read twice has only such pages.
    const std::string stat = text_of(directory + "/memory.stat");  // the first version's totals are with groups below
    const std::size_t files = number_after(two ? "inactive_file " : "total_inactive_file ", stat).value_or(0) +
                              number_after(two ? "active_file " : "total_active_file ", stat).value_or(0);
    const std::size_t needed = used - std::min(used, files);
    return limit - std::min(limit, needed);
  });
}

int control_group_processors(const TextOf& text_of) {
  const std::size_t least = least_left("cpu", text_of, [&](Version version, const std::string& directory) {
    // Microseconds of processors' time in each period; other words, and -1, are no limit.
    const std::string both = version == Version::k2 ? text_of(directory + "/cpu.max")
                                                    : text_of(directory + "/cpu.cfs_quota_us") + " " +
                                                          text_of(directory + "/cpu.cfs_period_us");
    std::istringstream in(both);
    long long quota = 0, period = 0;
    if (!(in >> quota >> period) || quota <= 0 || period <= 0) return kUnlimited;
    return static_cast<std::size_t>(quota / period + (quota % period != 0 ? 1 : 0));
  });
  return static_cast<int>(std::min(least, std::size_t{std::numeric_limits<int>::max()}));
}

}  // namespace treeattn::base
