// SPDX-License-Identifier: Apache-2.0
// What this process has in memory now, for tests of memory that is given back.
#pragma once

#include <cstddef>
#include <fstream>
#include <sstream>
#include <string>

namespace treeattn {

// VmRSS of /proc/self/status; 0 where the kernel does not say.
inline std::size_t resident_bytes() {
  const std::string key = "VmRSS:";
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(key)) continue;
    std::istringstream in(line.substr(key.size()));
    std::size_t kilobytes = 0;
    in >> kilobytes;
    return kilobytes << 10;
  }
  return 0;
}

}  // namespace treeattn
