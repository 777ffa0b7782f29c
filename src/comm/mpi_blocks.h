// SPDX-License-Identifier: Apache-2.0
// How a message is measured for MPI, which counts in int.
#pragma once

#include <cstddef>
#include <memory>

#include "treeattn/communicator.h"

namespace treeattn::comm {

// Longer messages are counted in blocks of so many bytes; in a simulation they go in pieces of no more.
inline constexpr std::size_t kLargestBlock = std::size_t{1} << 30;

// mpi_communicator() with blocks of another size: long messages can be tested without the memory they take.
std::shared_ptr<Communicator> mpi_communicator_of_blocks(std::size_t largest_block);

}  // namespace treeattn::comm
