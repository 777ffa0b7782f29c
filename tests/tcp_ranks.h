// SPDX-License-Identifier: Apache-2.0
// Ranks connected by TCP on this machine, as threads or as processes of a test.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "treeattn/communicator.h"

namespace treeattn::testing {

// A port of this machine; 0: any.
inline sockaddr_in loopback_at(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  return address;
}

// A port that nobody has. Below those that the system gives to connections by itself: one of that range could be taken
// between this and its use.
inline int free_port() {
  static std::mt19937 random{std::random_device{}()};
  for (int attempt = 0; attempt < 100; ++attempt) {
    const int port = std::uniform_int_distribution<int>(15000, 30000)(random);
    const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
    const sockaddr_in address = loopback_at(port);
    const bool free = fd >= 0 && ::bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
    ::close(fd);
    if (free) return port;
  }
  throw std::runtime_error("no free port between 15000 and 30000");
}

inline RankOptions with_deadline(double seconds) {
  RankOptions options;
  options.deadline = Seconds(seconds);
  return options;
}

using RankBody = std::function<void(std::shared_ptr<Communicator>)>;

// Rethrows what the lowest rank threw.
inline void run_tcp_threads(int ranks, const RankBody& body, const RankOptions& options = {}) {
  const int port = free_port();
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(tcp_communicator(TcpPlace{rank, ranks, "127.0.0.1", port}, options));
      } catch (...) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

// Forks; to be called while this process has no other thread. The exit status of each rank: 0 when its body returned,
// 1 when it threw, 128 + the signal that ended it. meanwhile(process ids): called while they run.
inline std::vector<int> run_tcp_processes(int ranks, const RankBody& body, const RankOptions& options = {},
                                          const std::function<void(const std::vector<pid_t>&)>& meanwhile = {}) {
  const int port = free_port();
  std::vector<pid_t> children;
  std::fflush(nullptr);
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t child = ::fork();
    if (child < 0) throw std::runtime_error("no fork");
    if (child == 0) {
      int status = 0;
      try {
        body(tcp_communicator(TcpPlace{rank, ranks, "127.0.0.1", port}, options));
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d of %d: %s\n", rank, ranks, error.what());
        status = 1;
      }
      std::fflush(nullptr);
      ::_exit(status);
    }
    children.push_back(child);
  }
  if (meanwhile) meanwhile(children);
  std::vector<int> statuses;
  for (const pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    statuses.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
  }
  return statuses;
}

}  // namespace treeattn::testing
