// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "base/control_group.h"

namespace treeattn::base {

// Memory that can be allocated now without swapping: MemAvailable, or less where a control group, one of its parents
// or a limit of addresses (ulimit -v) or of data (ulimit -d) leaves less. It changes all the time. 0 where the kernel
// does not say.
std::size_t available_memory();

// Addresses that this process may still take: without a limit (ulimit -v) more than it could.
std::size_t available_addresses();

// The same, as these files of /proc and /sys have it.
std::size_t available_memory(const TextOf& text_of);

}  // namespace treeattn::base
