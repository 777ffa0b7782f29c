// SPDX-License-Identifier: Apache-2.0
// How ranks that are processes find each other: rank 0 listens where all know it, collects where the others listen,
// tells them, and then every two ranks have a connection.
#pragma once

#include <netdb.h>

#include <chrono>
#include <string>
#include <vector>

#include "treeattn/communicator.h"

namespace treeattn::comm {

// A file descriptor that is closed with its owner. Movable.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  ~Socket();
  Socket(Socket&& other) noexcept : fd_(other.release()) {}
  Socket& operator=(Socket&& other) noexcept;
  int fd() const { return fd_; }
  bool open() const { return fd_ >= 0; }
  int release() {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }

 private:
  int fd_ = -1;
};

// A connection to whichever of a host's addresses answers first. All are called at once: at some there may be nobody
// who says no. And again and again: the other side may not be there yet. Throws Unavailable when the time is over.
Socket connect_to_any(const addrinfo* addresses, const std::string& whom, std::chrono::steady_clock::time_point until);

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
