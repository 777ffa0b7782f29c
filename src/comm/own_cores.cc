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

namespace {

// What tells ranks apart that share something.
struct Shared {
  std::uint32_t cores = 0;  // equal: the same ones may be used
  std::uint32_t time = 0;   // equal: one limit for all
};

}  // namespace

int take_own_cores(Communicator& communicator) {
  const std::vector<int> processors = comm::order_by_neighbourhood(base::usable_processors());
  const std::string machine = base::machine_name();
  const Shared mine{base::crc32c_of_texts(std::vector{fmt::format("{}: {}", machine, fmt::join(processors, ","))}),
                    base::crc32c_of_texts(std::vector{machine, base::control_group_name()})};
  std::vector<Shared> all(static_cast<std::size_t>(communicator.size()));
  communicator.allgather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
  const auto same_time = std::count_if(all.begin(), all.end(), [&](const Shared& of) { return of.time == mine.time; });
  const int in_time = std::max(1, base::quota_cores() / static_cast<int>(same_time));
  if (processors.empty()) return std::min(ThreadPool::available_cores(), in_time);  // the system does not say which
  const auto same_cores = [&](const Shared& of) { return of.cores == mine.cores; };
  const auto before = std::count_if(all.begin(), all.begin() + communicator.rank(), same_cores);
  const auto sharing = static_cast<int>(std::count_if(all.begin(), all.end(), same_cores));
  const std::vector<int> part = comm::cut_processors(processors, sharing)[static_cast<std::size_t>(before)];
  base::stay_on(part);
  return std::min(static_cast<int>(part.size()), in_time);
}

}  // namespace treeattn
