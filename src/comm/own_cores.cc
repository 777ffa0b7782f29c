// SPDX-License-Identifier: Apache-2.0
// Cores for ranks that are processes: what run_ranks() does for threads.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "base/checksum.h"
#include "base/machine.h"
#include "comm/topology.h"
#include "treeattn/communicator.h"
#include "treeattn/thread_pool.h"

namespace treeattn {

int take_own_cores(Communicator& communicator) {
  const std::vector<int> processors = comm::order_by_neighbourhood(base::usable_processors());
  const std::string cores = fmt::format("{}: {}", base::machine_name(), fmt::join(processors, ","));
  const std::uint32_t mine = base::crc32c_of_texts(std::vector{cores});
  std::vector<std::uint32_t> all(static_cast<std::size_t>(communicator.size()));
  communicator.allgather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
  if (processors.empty()) return ThreadPool::available_cores();  // the system does not say
  const auto before = std::count(all.begin(), all.begin() + communicator.rank(), mine);
  const auto sharing = static_cast<int>(std::count(all.begin(), all.end(), mine));
  const std::vector<int> part = comm::cut_processors(processors, sharing)[static_cast<std::size_t>(before)];
  base::stay_on(part);
  return static_cast<int>(part.size());
}

}  // namespace treeattn
