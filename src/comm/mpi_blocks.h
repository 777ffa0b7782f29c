// SPDX-License-Identifier: Apache-2.0
// How a message is measured for MPI, which counts in int.
#pragma once

#include <cstddef>

namespace treeattn::comm {

// Longer messages are counted in blocks of so many bytes; in a simulation they go in pieces of no more. Tests make it
// small.
inline std::size_t largest_block = std::size_t{1} << 30;

}  // namespace treeattn::comm
