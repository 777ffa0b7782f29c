// SPDX-License-Identifier: Apache-2.0
// What a program says when memory has run out, or threads, which need some.
#pragma once

#include <fmt/format.h>
#include <sys/resource.h>

#include <string>

#include "command.h"
#include "notes.h"

namespace treeattn::tools {

// What RLIMIT_AS and the like allow; 0: all there is.
inline rlim_t memory_limit(int kind) {
  rlimit limit{};
  return ::getrlimit(kind, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY ? limit.rlim_cur : 0;
}

// A limit is named: it may be reached while the machine has memory left.
inline std::string limit_text(const char* otherwise) {
  const rlim_t addresses = memory_limit(RLIMIT_AS), data = memory_limit(RLIMIT_DATA);
  if (addresses > 0) return fmt::format("this process may have {} KiB of addresses (ulimit -v)", addresses / 1024);
  return data > 0 ? fmt::format("this process may have {} KiB of data (ulimit -d)", data / 1024) : otherwise;
}

inline std::string no_memory_text() {
  return "memory ran out: " + limit_text("this machine has not enough for what was asked");
}

inline std::string no_threads_text() {
  return "so many threads cannot be started: " +
         limit_text("this machine has not enough memory, or a limit (ulimit -u, pids of a container)");
}

// The exit code.
inline int fail_no_memory() {
  print_note("treeattn: {}\n", no_memory_text());
  return kUnavailable;
}

}  // namespace treeattn::tools
