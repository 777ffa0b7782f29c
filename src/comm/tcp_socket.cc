// SPDX-License-Identifier: Apache-2.0
#include "comm/tcp_socket.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/tcp.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <future>
#include <memory>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "treeattn/error.h"

namespace treeattn::comm {
namespace {

using base::Clock;

constexpr std::chrono::milliseconds kRetry{20};
constexpr std::chrono::milliseconds kAskForNameAgain{200};

void wait_until(int fd, short events, const TcpDeadline& deadline, const std::string& what) {
  pollfd entry{fd, events, 0};
  wait_until({&entry, 1}, deadline, what);
}

// Of a host, or, where that is empty, of this machine.
struct Addresses {
  int error = 0;  // as getaddrinfo says it
  std::shared_ptr<const addrinfo> list;
};

Addresses look_up(const std::string& host, int port, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* list = nullptr;
  const char* name = host.empty() ? nullptr : host.c_str();
  const int error = ::getaddrinfo(name, std::to_string(port).c_str(), &hints, &list);
  if (error != 0) return {error, nullptr};
  return {0, {list, ::freeaddrinfo}};
}

// None when no name server has answered by then. Nothing ends a getaddrinfo that waits, so it is left to a thread that
// owns all it uses, and that nobody waits for any longer.
std::optional<Addresses> ask_for(const std::string& host, int port, Clock::time_point until) {
  std::packaged_task<Addresses()> task([host, port] { return look_up(host, port, 0); });
  std::future<Addresses> found = task.get_future();
  std::thread(std::move(task)).detach();
  if (found.wait_until(until) != std::future_status::ready) return {};
  return found.get();
}

// A cluster may give a machine its name only when that has started: it is asked for again and again.
Addresses addresses_of(const std::string& host, int port, Clock::time_point until) {
  const Addresses numeric = look_up(host, port, AI_NUMERICHOST);
  if (numeric.error == 0) return numeric;
  for (;;) {
    const std::optional<Addresses> found = ask_for(host, port, until);
    if (!found) throw_late(fmt::format("address {}: no answer from a name server", host));
    if (found->error == 0) return *found;
    std::this_thread::sleep_until(std::min(Clock::now() + kAskForNameAgain, until));
    if (Clock::now() >= until) throw_late(fmt::format("address {}: {}", host, ::gai_strerror(found->error)));
  }
}

// Whether a socket is connected to itself. The system may give it the very port that it calls, if nobody listens there
// yet; who calls again and again is given one port after the other, until it is that one.
bool calls_itself(const Socket& socket) {
  sockaddr_storage own{}, other{};
  socklen_t own_size = sizeof own, other_size = sizeof other;
  return ::getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&own), &own_size) == 0 &&
         ::getpeername(socket.fd(), reinterpret_cast<sockaddr*>(&other), &other_size) == 0 && own_size == other_size &&
         std::memcmp(&own, &other, own_size) == 0;
}

// A call under way to one address; closed where that is known to be in vain.
Socket begin_call(const addrinfo& address, const std::string& whom) {
  Socket socket(::socket(address.ai_family, address.ai_socktype, address.ai_protocol));
  if (!socket.open() && errno != EAFNOSUPPORT) throw_tcp("a socket to " + whom);
  if (!socket.open()) return socket;
  set_options(socket.fd());
  const bool begun = ::connect(socket.fd(), address.ai_addr, address.ai_addrlen) == 0 || errno == EINPROGRESS;
  return begun ? std::move(socket) : Socket();
}

}  // namespace

Socket::~Socket() {
  if (fd_ >= 0) ::close(fd_);
}

Socket& Socket::operator=(Socket&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

void throw_tcp(const std::string& what) {
  throw Unavailable(fmt::format("tcp_communicator: {}: {}", what, std::strerror(errno)));
}

void throw_late(const std::string& what) {
  throw Unavailable(fmt::format("tcp_communicator: {} within the deadline", what));
}

void set_options(int fd) {
  ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL, 0) | O_NONBLOCK);
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
}

void wait_until(std::span<pollfd> entries, const TcpDeadline& deadline, const std::string& what) {
  for (;;) {
    const int ready = ::poll(entries.data(), entries.size(), deadline.milliseconds());
    if (ready > 0) return;
    if (ready == 0) throw_late(what);
    if (errno != EINTR) throw_tcp(what);
  }
}

void send_all(int fd, std::span<const std::byte> data, const TcpDeadline& deadline, const std::string& what) {
  while (!data.empty()) {
    const ssize_t sent = ::send(fd, data.data(), data.size(), MSG_NOSIGNAL);
    if (sent > 0) {
      data = data.subspan(static_cast<std::size_t>(sent));
    } else if (errno == EAGAIN || errno == EINTR) {
      wait_until(fd, POLLOUT, deadline, what);
    } else {
      throw_tcp(what);
    }
  }
}

bool receive_all(int fd, std::span<std::byte> data, const TcpDeadline& deadline, const std::string& what) {
  while (!data.empty()) {
    const ssize_t got = ::recv(fd, data.data(), data.size(), 0);
    if (got > 0) {
      data = data.subspan(static_cast<std::size_t>(got));
    } else if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
      wait_until(fd, POLLIN, deadline, what);
    } else {
      return false;
    }
  }
  return true;
}

Socket listen_on(int port) {
  const Addresses addresses = look_up("", port, AI_PASSIVE);
  if (addresses.error != 0) {
    throw Unavailable(fmt::format("tcp_communicator: port {}: {}", port, ::gai_strerror(addresses.error)));
  }
  for (const int family : {AF_INET6, AF_INET}) {
    for (const addrinfo* a = addresses.list.get(); a != nullptr; a = a->ai_next) {
      if (a->ai_family != family) continue;
      Socket socket(::socket(a->ai_family, a->ai_socktype, a->ai_protocol));
      if (!socket.open()) continue;
      set_options(socket.fd());
      const int off = 0;
      ::setsockopt(socket.fd(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
      if (::bind(socket.fd(), a->ai_addr, a->ai_addrlen) == 0 && ::listen(socket.fd(), SOMAXCONN) == 0) return socket;
      // Not by IPv4 alone: some would call the one who has it.
      if (errno == EADDRINUSE) {
        throw Unavailable(
            fmt::format("tcp_communicator: port {} is in use; accepted: another one (MASTER_PORT), and "
                        "rank 0 once",
                        port));
      }
    }
  }
  throw_tcp(fmt::format("port {}", port));
}

int port_of(const Socket& socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (::getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&address), &size) != 0) throw_tcp("own port");
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<sockaddr_in&>(address).sin_port);
}

Socket connect_to_any(const addrinfo* addresses, const std::string& whom, Clock::time_point until) {
  std::vector<Socket> calls;
  for (;;) {
    std::vector<pollfd> entries;
    for (const addrinfo* a = addresses; a != nullptr; a = a->ai_next) {
      if (calls.size() == entries.size()) calls.emplace_back();
      Socket& call = calls[entries.size()];
      if (!call.open()) call = begin_call(*a, whom);
      entries.push_back({call.fd(), POLLOUT, 0});
    }
    ::poll(entries.data(), entries.size(), static_cast<int>(kRetry.count()));
    for (std::size_t i = 0; i < calls.size(); ++i) {
      if (entries[i].revents == 0) continue;
      int error = 0;
      socklen_t size = sizeof error;
      ::getsockopt(calls[i].fd(), SOL_SOCKET, SO_ERROR, &error, &size);
      if (error == 0 && !calls_itself(calls[i])) return std::move(calls[i]);
      calls[i] = Socket();
    }
    if (Clock::now() >= until) throw_late("no answer from " + whom);
    std::this_thread::sleep_for(kRetry);
  }
}

Socket connect_to(int rank, const std::string& host, int port, const TcpDeadline& deadline) {
  const Addresses addresses = addresses_of(host, port, deadline.end());
  return connect_to_any(addresses.list.get(), fmt::format("rank {} at {}:{}", rank, host, port), deadline.end());
}

std::string address_of(const sockaddr_storage& from, socklen_t size) {
  char text[NI_MAXHOST] = {};
  ::getnameinfo(reinterpret_cast<const sockaddr*>(&from), size, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
  std::string_view address = text;
  constexpr std::string_view kMapped = "::ffff:";  // an address of IPv4 on a socket of IPv6
  if (address.starts_with(kMapped)) address.remove_prefix(kMapped.size());
  return address == "::1" || address.starts_with("127.") ? std::string() : std::string(address);
}

}  // namespace treeattn::comm
