// SPDX-License-Identifier: Apache-2.0
#include "device.h"

#include <mpi.h>
#include <smpi/smpi.h>

#include <simgrid/s4u.hpp>

namespace treeattn::tools {

// A device does one thing at a time, so its work is a pause. (SimGrid's own executions do the same, and each is kept in
// a list that the next ones search.)
void ModelledDevice::attend(std::uint64_t kv_bytes) {
  wait(model_.call_bytes(kv_bytes) / simgrid::s4u::this_actor::get_host()->get_speed());
}

void ModelledDevice::wait(double seconds) {
  if (seconds > 0) simgrid::s4u::this_actor::sleep_for(seconds);
}

std::span<std::byte> modelled_memory(std::size_t bytes, std::size_t largest) {
  static std::size_t have = 0;
  static std::byte* memory = nullptr;
  if (have < largest) {
    memory = static_cast<std::byte*>(SMPI_SHARED_MALLOC(largest));
    have = largest;
  }
  return {memory, bytes};
}

}  // namespace treeattn::tools
