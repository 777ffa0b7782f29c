// SPDX-License-Identifier: Apache-2.0
// Communicators within one process: one rank alone, and ranks that are threads.
#include <algorithm>
#include <exception>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/machine.h"
#include "comm/thread_transport.h"
#include "comm/topology.h"
#include "treeattn/communicator.h"
#include "treeattn/error.h"

namespace treeattn {
namespace {

// Each of them knows all others: a million of them would take all memory before a thread is refused.
constexpr int kMostRanks = 4096;

bool is_lost_ranks(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const LostRanks&) {
    return true;
  } catch (...) {
    return false;
  }
}

}  // namespace

std::shared_ptr<Communicator> self_communicator() {
  auto hub = std::make_shared<comm::ThreadHub>("self", std::vector<int>{0}, false);
  return std::make_shared<Communicator>(comm::thread_transport(std::move(hub), 0));
}

void run_ranks(int ranks, const std::function<void(std::shared_ptr<Communicator>)>& body, RankOptions options) {
  base::require(ranks >= 1 && ranks <= kMostRanks, "ranks = {}; accepted: 1 to {}", ranks, kMostRanks);
  base::require(body != nullptr, "body is empty; accepted: a function");
  const auto count = static_cast<std::size_t>(ranks);
  const std::vector<int> processors = comm::order_by_neighbourhood(base::usable_processors());
  std::vector<std::vector<int>> places(count);
  if (options.pin && !processors.empty()) places = comm::cut_processors(processors, ranks);
  std::vector<int> found(count, 0);
  std::transform(places.begin(), places.end(), found.begin(),
                 [](const auto& place) { return place.empty() ? 0 : comm::numa_node_of(place.front()); });
  const auto hub = std::make_shared<comm::ThreadHub>("threads", comm::choose_nodes(options.nodes, found),
                                                     ranks <= base::usable_cores());

  std::vector<std::exception_ptr> errors(count);
  const auto run = [&](int rank) {
    try {
      base::stay_on(places[static_cast<std::size_t>(rank)]);
      auto communicator = std::make_shared<Communicator>(comm::thread_transport(hub, rank));
      communicator->set_deadline(options.deadline);
      body(std::move(communicator));
    } catch (...) {
      errors[static_cast<std::size_t>(rank)] = std::current_exception();
    }
    hub->leave(rank);
  };
  std::vector<std::thread> threads;
  std::exception_ptr failure;  // to start a thread
  for (int rank = 0; rank < ranks; ++rank) {
    try {
      if (!failure) threads.emplace_back(run, rank);
    } catch (...) {
      failure = std::current_exception();
    }
    if (failure) hub->leave(rank);
  }
  for (std::thread& thread : threads) thread.join();

  if (failure) std::rethrow_exception(failure);
  std::stable_partition(errors.begin(), errors.end(), [](const auto& error) { return error && !is_lost_ranks(error); });
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace treeattn
