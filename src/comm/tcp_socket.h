// SPDX-License-Identifier: Apache-2.0
// Sockets with a deadline: listening, calling, names and addresses. What fails throws Unavailable, which names it.
#pragma once

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <span>
#include <string>

#include "base/timing.h"
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

// All that has to be done by then.
class TcpDeadline {
 public:
  explicit TcpDeadline(Seconds within)
      : end_(base::Clock::now() + std::chrono::duration_cast<base::Clock::duration>(std::min(within, Seconds(1e6)))) {}
  int milliseconds() const {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end_ - base::Clock::now()).count();
    return static_cast<int>(std::clamp<long long>(left, 0, 1 << 30));
  }
  base::Clock::time_point end() const { return end_; }
  bool over() const { return base::Clock::now() >= end_; }

 private:
  base::Clock::time_point end_;
};

// Unavailable, with what the system says, and for what was not there in time.
[[noreturn]] void throw_tcp(const std::string& what);
[[noreturn]] void throw_late(const std::string& what);

// Before it is bound or connected. Its address may be used again: neither what an earlier run has closed keeps rank 0
// from listening, nor a socket that has called itself (see calls_itself).
void set_options(int fd);

// Until one of them is ready.
void wait_until(std::span<pollfd> entries, const TcpDeadline& deadline, const std::string& what);
void send_all(int fd, std::span<const std::byte> data, const TcpDeadline& deadline, const std::string& what);
// False when the other side has gone.
bool receive_all(int fd, std::span<std::byte> data, const TcpDeadline& deadline, const std::string& what);

// On all interfaces; port 0: any free one. A socket of IPv6 is there for IPv4, too.
Socket listen_on(int port);
int port_of(const Socket& socket);

// A connection to whichever of a host's addresses answers first. All are called at once: at some there may be nobody
// who says no. And again and again: the other side may not be there yet.
Socket connect_to_any(const addrinfo* addresses, const std::string& whom, base::Clock::time_point until);
// The same of a host by its name, which may not be known yet: it is asked for again and again.
Socket connect_to(int rank, const std::string& host, int port, const TcpDeadline& deadline);

// Where somebody comes from, as others can use it; empty for this machine, whose loopback is another one elsewhere.
std::string address_of(const sockaddr_storage& from, socklen_t size);

}  // namespace treeattn::comm
