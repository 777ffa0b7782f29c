// SPDX-License-Identifier: Apache-2.0
// Ranks that are MPI processes: the list of cases, on however many ranks mpirun started. Every rank's exit status says
// whether all is well.
#include <mpi.h>

#include <cstdio>
#include <exception>
#include <utility>

#include "comm/mpi_pieces.h"
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

// Messages that are cut into pieces, without the memory that takes.
void check_pieces(Communicator& world) {
  struct Short {
    std::size_t usual = std::exchange(comm::largest_piece, 1000);
    ~Short() { comm::largest_piece = usual; }
  } pieces;
  testing::check_ring(world);
  testing::check_order(world);
  testing::check_self_message(world);
  testing::check_broadcast(world);
  if (world.size() == 1) return;  // Open MPI does not see all of them in a message to itself
  // A refused message takes its other pieces along.
  const int next = (world.rank() + 1) % world.size(), previous = (world.rank() + world.size() - 1) % world.size();
  const auto refuse = [&](std::size_t sent, std::size_t asked) {
    auto out = std::make_shared<std::vector<std::byte>>(sent);
    auto in = std::make_shared<std::vector<std::byte>>(asked);
    Request receive = world.receive(previous, *in, in);
    Request send = world.send(next, *out, out);
    expect(testing::throws<Error>([&] { world.wait(receive); }), "{} bytes received as {}", sent, asked);
    expect(world.lost().empty(), "{} bytes received as {}: a rank is lost", sent, asked);
    world.barrier();  // what a rank asked for too much may take what comes before it knows
    testing::check_ring(world);
    world.wait(send);
  };
  for (const std::size_t asked : {0, 833, 834, 999, 1000, 1001, 1002, 1003, 2000, 2499, 2501, 3000, 3333, 3336, 7000}) {
    refuse(2500, asked);
  }
  for (const std::size_t sent : {0, 500, 1000, 1001, 7000}) refuse(sent, 2500);
}

int run() {
  const auto world = mpi_communicator();
  expect(world->transport() == "mpi" && mpi_available() && launched_by_mpi(), "this is not MPI");
  int failed = 0;
  auto cases = testing::comm_cases();
  cases.push_back({"TwoCommunicators", check_two_communicators});
  cases.push_back({"GivenUp", check_given_up});
  cases.push_back({"Pieces", check_pieces});
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
