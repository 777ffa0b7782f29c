// SPDX-License-Identifier: Apache-2.0
// How ranks that are processes find each other: rank 0 listens where all know it, collects where the others listen,
// tells them, and then every two ranks have a connection.
#pragma once

#include <string>
#include <vector>

#include "comm/tcp_socket.h"
#include "treeattn/communicator.h"

namespace treeattn::comm {

// Each keeps a connection to every other: far more than a process may open.
constexpr int kMostTcpRanks = 65536;

// What names this run, by the variables that launchers set: TcpPlace::job. All ranks of a run must find the same, so
// what a launcher may give them differently is not asked for.
std::string job_of_launcher();

struct TcpMesh {
  std::vector<Socket> sockets;       // [size] to each rank, non-blocking; closed at this rank's own place
  std::vector<std::string> machine;  // [size] what names the machine a rank runs on
};

// Collective. Throws InvalidArgument for a bad place, Unavailable when the others are not there within the deadline or
// are of another version or job, too few files may be open, or the network says no.
TcpMesh connect_mesh(const TcpPlace& place, Seconds deadline);

}  // namespace treeattn::comm
