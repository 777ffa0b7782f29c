// SPDX-License-Identifier: Apache-2.0
// Ranks that are MPI processes: the list of cases, on however many ranks mpirun started. Every rank's exit status says
// whether all is well.
#include <mpi.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <string_view>
#include <vector>

#include "comm/mpi_blocks.h"
#include "comm_cases.h"

namespace treeattn {
namespace {

using testing::expect;

void check_two_communicators(Communicator& world) {
  // Over a communicator of the caller's, beside the first one.
  RankOptions options;
  options.deadline = Seconds(20);
  for (int rank = 0; rank < world.size(); ++rank) options.nodes.push_back(rank);
  const auto other = mpi_communicator(static_cast<int>(MPI_Comm_c2f(MPI_COMM_WORLD)), options);
  expect(other->size() == world.size() && other->rank() == world.rank(), "another communicator");
  expect(other->nodes() == world.size(), "{} nodes, one for each rank asked for", other->nodes());
  expect(other->deadline() == options.deadline, "deadline {}", other->deadline().count());
  testing::check_chain(*other, 10);
  testing::check_chain(world, 10);
  testing::check_ring(*other);
}

// MPI itself would end the process.
void check_wrong_handles() {
  for (const MPI_Fint handle : {MPI_Comm_c2f(MPI_COMM_NULL), 123456}) {
    try {
      mpi_communicator(static_cast<int>(handle));
      expect(false, "handle {} was taken", handle);
    } catch (const InvalidArgument& error) {
      expect(std::string_view(error.what()).starts_with("fortran_handle = "), "{}", error.what());
    }
  }
}

// Everything sent is on one node, and a message given up does not harm the next one.
void check_given_up(Communicator& world) {
  expect(world.nodes() == 1 && world.node_of(world.size() - 1) == 0, "{} nodes on one machine", world.nodes());
  {
    auto room = std::make_shared<std::vector<std::byte>>(100000);
    const Request request = world.receive((world.rank() + 1) % world.size(), *room, room);
  }
  world.barrier();  // had the next message been under way already, it might have gone with this receive
  testing::check_ring(world);
}

// Messages too long to be counted in bytes, without the memory that takes.
void check_long_messages(Communicator&) {
  const auto blocks = comm::mpi_communicator_of_blocks(1000);
  Communicator& world = *blocks;
  testing::check_ring(world);
  testing::check_order(world);
  testing::check_self_message(world);
  testing::check_broadcast(world);
  if (world.size() == 1) return;
  // A receive that is refused takes the message it met and no other, whoever is waited for first. Messages that are too
  // long for theirs are short: Open MPI 4.1 writes one past the end where it does not come along with its header, and
  // always in a message to oneself.
  const int next = (world.rank() + 1) % world.size(), previous = (world.rank() + world.size() - 1) % world.size();
  const auto refuse = [&](std::size_t sent, std::size_t asked, std::size_t after) {
    std::vector<std::byte> out(sent), in(asked), good = testing::pattern(after, 7), came(after);
    for (const bool in_order : {true, false}) {
      std::ranges::fill(came, std::byte{0});
      Request refused = world.receive(previous, in), taken = world.receive(previous, came);
      Request first = world.send(next, out), second = world.send(next, good);
      if (!in_order) world.wait(taken);
      expect(testing::throws<Error>([&] { world.wait(refused); }), "{} bytes received as {}", sent, asked);
      expect(world.lost().empty(), "{} bytes received as {}: a rank is lost", sent, asked);
      world.wait(taken);
      expect(came == good, "{} bytes after {} that were received as {}", after, sent, asked);
      world.wait(first);
      world.wait(second);
    }
  };
  for (const std::size_t after : {8, 749, 1000, 2500, 5000}) {
    for (const std::size_t asked : {0, 749, 999, 1000, 1001, 1002, 2000, 2499, 2501, 3000, 7000}) {
      refuse(2500, asked, after);
    }
    for (const std::size_t sent : {0, 500, 1000, 1001, 2499}) refuse(sent, 7000, after);
  }
}

int run() {
  const auto world = mpi_communicator();
  expect(world->transport() == "mpi" && mpi_available() && launched_by_mpi(), "this is not MPI");
  int failed = 0;
  auto cases = testing::comm_cases();
  cases.push_back({"TwoCommunicators", check_two_communicators});
  cases.push_back({"WrongHandles", [](Communicator&) { check_wrong_handles(); }});
  cases.push_back({"GivenUp", check_given_up});
  cases.push_back({"LongMessages", check_long_messages});
  for (const auto& one : cases) {
    try {
      one.run(*world);
      world->barrier();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "rank %d of %d: %s: %s\n", world->rank(), world->size(), one.name.c_str(), error.what());
      ++failed;
    }
  }
  return failed;
}

}  // namespace
}  // namespace treeattn

int main() {
  try {
    return treeattn::run() == 0 ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
