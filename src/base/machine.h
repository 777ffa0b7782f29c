// SPDX-License-Identifier: Apache-2.0
// Facts about this machine, read from the kernel's own tables: processor, cores, caches, memory.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace treeattn::base {

// Sizes in bytes; 0 where the kernel does not say.
struct Machine {
  std::string cpu_model;         // e.g. "Neoverse-V1"
  std::string architecture;      // e.g. "aarch64"
  int logical_cores = 0;         // online in the machine
  int usable_cores = 0;          // those that this process can keep busy
  std::size_t l1d_bytes = 0;     // of one core
  std::size_t l2_bytes = 0;      // one instance
  std::size_t l3_bytes = 0;      // one instance
  std::size_t memory_bytes = 0;  // in the machine
  std::size_t page_bytes = 0;

  // The largest cache known: what a buffer must exceed to be read from memory.
  std::size_t last_cache_bytes() const;
};

Machine read_machine();

// The processors in the calling thread's affinity mask, ordered so that the first n lie on as many different physical
// cores as possible. Empty where the system has no such mask.
std::vector<int> usable_processors();

// Threads that can run at once: the processors in that mask, or fewer where control groups give the process less of
// their time (a container's CPU limit). More would be stopped, all of them, for the rest of each period.
int usable_cores();
// As many as that time is worth, rounded up, whatever the mask; without such a limit more than there are.
int quota_cores();

// Keeps the calling thread on these processors, unless there are none. Best effort: a sandbox may refuse.
void stay_on(std::span<const int> processors);

// The same for all processes of a machine, containers included, and of no other machine.
std::string machine_name();

// The same for processes of one machine that are in the same control groups, and so have their limits together.
std::string control_group_name();

// "0-3,8,10-11" -> {0, 1, 2, 3, 8, 10, 11}. Stops at the first character that does not fit.
std::vector<int> parse_processor_list(const std::string& text);

}  // namespace treeattn::base
