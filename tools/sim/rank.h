// SPDX-License-Identifier: Apache-2.0
// What one simulated rank does: a decoding step by the library's own transport, reducers and ring.
#pragma once

#include <cstdint>
#include <string>

#include "scenario.h"
#include "treeattn/communicator.h"

namespace treeattn::tools {

// Simulated seconds since the call began.
struct RankReport {
  double local_s = 0;  // attending
  double end_s = 0;
  std::uint64_t device_bytes = 0;
  Traffic traffic;
  std::string failure;
};

// The call that the scenario has chosen.
RankReport decode_step(const Scenario& scenario, Communicator& world);

}  // namespace treeattn::tools
