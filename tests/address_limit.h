// SPDX-License-Identifier: Apache-2.0
// As after ulimit -v, while it lives: this process may have only so many addresses more.
#pragma once

#include <sys/resource.h>
#include <unistd.h>

#include <cstddef>
#include <fstream>

namespace treeattn::testing_base {

class AddressLimit {
 public:
  explicit AddressLimit(std::size_t more) {
    std::size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    ::getrlimit(RLIMIT_AS, &usual_);
    rlimit tight = usual_;
    tight.rlim_cur = pages * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)) + more;
    ::setrlimit(RLIMIT_AS, &tight);
  }
  ~AddressLimit() { ::setrlimit(RLIMIT_AS, &usual_); }
  AddressLimit(const AddressLimit&) = delete;
  AddressLimit& operator=(const AddressLimit&) = delete;

 private:
  rlimit usual_{};
};

}  // namespace treeattn::testing_base
