// SPDX-License-Identifier: Apache-2.0
// One rank alone, and the numbers behind groups: nodes, cores, what a launcher leaves in the environment.
#include <gtest/gtest.h>

#include <cstdlib>

#include "comm/topology.h"
#include "comm_cases.h"

namespace treeattn {
namespace {

using Ints = std::vector<int>;

TEST(Comm, SelfRunsEveryCase) {
  const auto self = self_communicator();
  EXPECT_EQ(self->size(), 1);
  EXPECT_EQ(self->rank(), 0);
  EXPECT_EQ(self->nodes(), 1);
  EXPECT_EQ(self->transport(), "self");
  EXPECT_EQ(self->deadline(), kDefaultDeadline);
  for (const auto& one : testing::comm_cases()) {
    SCOPED_TRACE(one.name);
    EXPECT_NO_THROW(one.run(*self));
  }
}

TEST(Comm, WaitsNoLongerThanTheDeadline) {
  const auto self = self_communicator();
  std::vector<std::byte> data(8);
  Request request = self->receive(0, data);
  EXPECT_TRUE(request.pending());
  EXPECT_FALSE(self->test(request));
  // It waits for itself, and answers: too slow.
  EXPECT_THROW(self->wait(request, Seconds(0.05)), LostRanks);
  EXPECT_THROW(self->send(0, data), LostRanks);
}

TEST(Comm, RequestsMove) {
  const auto self = self_communicator();
  std::vector<std::byte> data(8);
  Request first = self->receive(0, data);
  Request second = std::move(first);
  EXPECT_FALSE(first.pending());  // NOLINT: what a moved-from request is, is promised
  EXPECT_TRUE(second.pending());
  second = Request();  // given up
  EXPECT_FALSE(second.pending());
  EXPECT_TRUE(self->test(second));
}

TEST(Comm, GroupsRunOutWithAnError) {
  const auto self = self_communicator();
  int made = 0;
  EXPECT_THROW(for (; made < 20000; ++made) self->split(0, 0), Error);
  EXPECT_GT(made, 10000);
}

TEST(Comm, ParsesNodes) {
  EXPECT_EQ(comm::parse_nodes("0,0,1,1", 4), (Ints{0, 0, 1, 1}));
  EXPECT_EQ(comm::parse_nodes("7", 1), Ints{7});
  for (const char* text : {"0,0,1", "0,0,1,1,1", "0,0,1,x", "0,0,,1", "0,0,1,", ",0,0,1", "0, 0,1,1", "0,0,1,-1", "",
                           "0,0,1,99999999999", "0;0;1;1", "0,0,1,1 "}) {
    EXPECT_THROW(comm::parse_nodes(text, 4), InvalidArgument) << text;
  }
  try {
    comm::parse_nodes("0,1", 3);
    ADD_FAILURE();
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(),
                 "TREEATTN_NODES = \"0,1\"; accepted: 3 whole numbers of at least 0 with commas between them, the node "
                 "of each rank");
  }
}

TEST(Comm, NumbersNodesByLowestRank) {
  EXPECT_EQ(comm::number_nodes({5, 5, 2, 9, 2}), (Ints{0, 0, 1, 2, 1}));
  EXPECT_EQ(comm::choose_nodes({3, 1}, {0, 0}), (Ints{0, 1}));
  EXPECT_EQ(comm::choose_nodes({}, {4, 4}), (Ints{0, 0}));
  EXPECT_THROW(comm::choose_nodes({1}, {0, 0}), InvalidArgument);
}

TEST(Comm, CutsProcessors) {
  EXPECT_EQ(comm::cut_processors({4, 5, 6, 7}, 2), (std::vector<Ints>{{4, 5}, {6, 7}}));
  EXPECT_EQ(comm::cut_processors({0, 1, 2}, 2), (std::vector<Ints>{{0}, {1, 2}}));
  EXPECT_EQ(comm::cut_processors({0, 1}, 4), (std::vector<Ints>{{0}, {0}, {1}, {1}}));
  EXPECT_EQ(comm::cut_processors({3}, 3), (std::vector<Ints>{{3}, {3}, {3}}));
  EXPECT_EQ(comm::order_by_neighbourhood({}), Ints{});
  EXPECT_GE(comm::numa_node_of(0), 0);
}

TEST(Comm, SeesALauncher) {
  const bool before = launched_by_mpi();
  ::setenv("PMI_RANK", "0", 1);
  EXPECT_TRUE(launched_by_mpi());
  ::unsetenv("PMI_RANK");
  EXPECT_EQ(launched_by_mpi(), before);
  if (!mpi_available()) {
    EXPECT_THROW(mpi_communicator(), Unavailable);
  }
}

}  // namespace
}  // namespace treeattn
