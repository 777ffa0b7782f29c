// SPDX-License-Identifier: Apache-2.0
// How a message is cut for MPI, which counts bytes in int.
#pragma once

#include <cstddef>

namespace treeattn::comm {

// Longer messages go in pieces. The same on every rank; tests make it small.
inline std::size_t largest_piece = std::size_t{1} << 30;

}  // namespace treeattn::comm
