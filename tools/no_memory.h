// SPDX-License-Identifier: Apache-2.0
// What a program says when memory has run out.
#pragma once

#include <sys/resource.h>

#include "command.h"
#include "notes.h"

namespace treeattn::tools {

// What RLIMIT_AS and the like allow; 0: all there is.
inline rlim_t memory_limit(int kind) {
  rlimit limit{};
  return ::getrlimit(kind, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY ? limit.rlim_cur : 0;
}

// The exit code. A limit is named: it counts addresses, so that it may be reached while the machine has memory left.
inline int fail_no_memory() {
  if (const rlim_t limit = memory_limit(RLIMIT_AS); limit > 0) {
    print_note("treeattn: memory ran out: this process may have {} KiB of addresses (ulimit -v)\n", limit / 1024);
  } else {
    print_note("treeattn: memory ran out: this machine has not enough for what was asked\n");
  }
  return kUnavailable;
}

}  // namespace treeattn::tools
