// SPDX-License-Identifier: Apache-2.0
// Connections that are no rank's.
#pragma once

#include <sys/socket.h>

#include <cerrno>
#include <thread>
#include <utility>

#include "comm/tcp_socket.h"
#include "tcp_ranks.h"

namespace treeattn::testing {

// Connected to rank 0 of this machine; closed where that does not listen.
inline comm::Socket try_knock_at(int port, int flags = 0) {
  const sockaddr_in address = loopback_at(port);
  comm::Socket socket(::socket(AF_INET, SOCK_STREAM | flags, 0));
  const bool there =
      ::connect(socket.fd(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 || errno == EINPROGRESS;
  return there ? std::move(socket) : comm::Socket();
}

// As soon as it listens.
inline comm::Socket knock_at(int port) {
  for (;;) {
    if (comm::Socket socket = try_knock_at(port); socket.open()) return socket;
    std::this_thread::yield();
  }
}

}  // namespace treeattn::testing
