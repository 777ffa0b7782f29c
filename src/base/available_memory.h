// SPDX-License-Identifier: Apache-2.0
// How much memory, and how many addresses, this process can still have.
#pragma once

#include <cstddef>
#include <optional>

#include "base/control_group.h"

namespace treeattn::base {

// Memory that can be allocated now without swapping: MemAvailable, or less where a control group, one of its parents
// or a limit of addresses (ulimit -v) or of data (ulimit -d) leaves less. It changes all the time. None where the
// kernel says nothing of the machine and there is no limit; 0 is a full one.
std::optional<std::size_t> available_memory();

// Addresses that this process may still take: without a limit (ulimit -v) more than it could.
std::size_t available_addresses();

// The same, as these files of /proc and /sys have it.
std::optional<std::size_t> available_memory(const TextOf& text_of);

}  // namespace treeattn::base
