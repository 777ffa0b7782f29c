// SPDX-License-Identifier: Apache-2.0
// The counters, and two lines of /proc/self/status.
#include "base/memory_meter.h"

#include <fstream>
#include <sstream>
#include <string>

namespace treeattn::base {
namespace {

std::size_t status_bytes(const std::string& key) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(key, 0) != 0) continue;
    std::istringstream in(line.substr(key.size()));
    std::size_t kilobytes = 0;
    in >> kilobytes;
    return kilobytes << 10;
  }
  return 0;
}

}  // namespace

void AllocationMeter::add(std::size_t bytes) {
  const auto more = static_cast<std::ptrdiff_t>(bytes);
  const std::ptrdiff_t now = current_.fetch_add(more, std::memory_order_relaxed) + more;
  std::ptrdiff_t peak = peak_.load(std::memory_order_relaxed);
  while (now > peak && !peak_.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
  }
}

void AllocationMeter::remove(std::size_t bytes) {
  current_.fetch_sub(static_cast<std::ptrdiff_t>(bytes), std::memory_order_relaxed);
}

void AllocationMeter::reset_peak() { peak_.store(current_.load(std::memory_order_relaxed), std::memory_order_relaxed); }

std::size_t peak_resident_bytes() { return status_bytes("VmHWM:"); }

std::size_t resident_bytes() { return status_bytes("VmRSS:"); }

}  // namespace treeattn::base
