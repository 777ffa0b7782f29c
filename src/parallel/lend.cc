// SPDX-License-Identifier: Apache-2.0
#include "parallel/lend.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/sent.h"
#include "base/this_process.h"
#include "parallel/agree.h"
#include "treeattn/error.h"

namespace treeattn::parallel {

using kernels::cuda::LentMemory;

bool on_one_machine(const Communicator& communicator) {
  return communicator.transport() == "threads" || communicator.nodes() == 1;
}

bool may_share_memory(const Communicator& communicator) {
  return communicator.transport() == "threads" || communicator.size() == 1;
}

bool share_one_gpu(Communicator& communicator, int gpu) {
  struct Seat {
    std::uint64_t process = 0;
    std::int64_t gpu = 0;
    bool operator==(const Seat&) const = default;
  };
  const Seat mine{base::this_process(), gpu};
  const std::vector<Seat> seats = gathered(communicator, mine);
  return may_share_memory(communicator) &&
         std::all_of(seats.begin(), seats.end(), [&](const Seat& seat) { return seat == mine; });
}

bool share_a_process(Communicator& communicator) {
  std::vector<std::uint64_t> processes = gathered(communicator, base::this_process());
  std::ranges::sort(processes);
  return std::ranges::adjacent_find(processes) != processes.end();
}

void require_reached(Communicator& communicator, const std::string& failure) {
  const std::optional<int> first = first_failed(communicator, !failure.empty());
  if (!first) return;
  throw Unavailable("exchange between GPUs: " + (failure.empty() ? fmt::format("failed on rank {}", *first) : failure));
}

bool connect_together(Communicator& communicator, LentMemory* mine, const std::string& failure) {
  const std::vector<LentMemory::Address> all =
      gathered(communicator, mine != nullptr ? mine->address() : LentMemory::Address{});
  require_reached(communicator, failure);
  for (int r = 0; r < communicator.size() && !may_share_memory(communicator); ++r) {
    base::require_sent(r == communicator.rank() || !LentMemory::is_of_this_process(all[static_cast<std::size_t>(r)]), r,
                       "memory of another process than its own; accepted: what it has to lend");
  }
  const std::string not_reached = failure_of([&] { mine->connect(all); });
  try {
    require_reached(communicator, not_reached);
  } catch (const Unavailable&) {
    free_together(communicator, *mine);
    throw;
  }
  return LentMemory::share_a_gpu(all);
}

void free_together(Communicator& communicator, LentMemory& mine) {
  mine.disconnect();
  communicator.barrier();
  mine.take_back();
}

}  // namespace treeattn::parallel
