// SPDX-License-Identifier: Apache-2.0
#include "comm/tcp_mesh.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <future>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/machine.h"
#include "comm/roll_call.h"
#include "comm/tcp_card.h"
#include "treeattn/error.h"

namespace treeattn::comm {
namespace {

using Clock = std::chrono::steady_clock;
using base::require;

constexpr std::chrono::milliseconds kRetry{20};
constexpr std::chrono::milliseconds kAskForNameAgain{200};

// All that has to be done by then.
class Deadline {
 public:
  explicit Deadline(Seconds within)
      : end_(Clock::now() + std::chrono::duration_cast<Clock::duration>(std::min(within, Seconds(1e6)))) {}
  int milliseconds() const {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end_ - Clock::now()).count();
    return static_cast<int>(std::clamp<long long>(left, 0, 1 << 30));
  }
  Clock::time_point end() const { return end_; }
  bool over() const { return Clock::now() >= end_; }

 private:
  Clock::time_point end_;
};

[[noreturn]] void fail(const std::string& what) {
  throw Unavailable(fmt::format("tcp_communicator: {}: {}", what, std::strerror(errno)));
}

[[noreturn]] void late(const std::string& what) {
  throw Unavailable(fmt::format("tcp_communicator: {} within the deadline", what));
}

// Said before anybody is waited for: a connection to every other rank, and one file to listen with.
void require_open_files(int size) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur > static_cast<rlim_t>(size)) return;
  throw Unavailable(
      fmt::format("tcp_communicator: size = {}, with a connection to every other rank, and this process may open {} "
                  "files; accepted: a limit (ulimit -n) some files above the size",
                  size, limit.rlim_cur));
}

// Before it is bound or connected. Its address may be used again: neither what an earlier run has closed keeps rank 0
// from listening, nor a socket that has called itself (see calls_itself).
void set_options(int fd) {
  ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL, 0) | O_NONBLOCK);
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
}

// Until one of them is ready.
void wait_until(std::span<pollfd> entries, const Deadline& deadline, const std::string& what) {
  for (;;) {
    const int ready = ::poll(entries.data(), entries.size(), deadline.milliseconds());
    if (ready > 0) return;
    if (ready == 0) late(what);
    if (errno != EINTR) fail(what);
  }
}

void wait_until(int fd, short events, const Deadline& deadline, const std::string& what) {
  pollfd entry{fd, events, 0};
  wait_until({&entry, 1}, deadline, what);
}

void send_all(int fd, std::span<const std::byte> data, const Deadline& deadline, const std::string& what) {
  while (!data.empty()) {
    const ssize_t sent = ::send(fd, data.data(), data.size(), MSG_NOSIGNAL);
    if (sent > 0) {
      data = data.subspan(static_cast<std::size_t>(sent));
    } else if (errno == EAGAIN || errno == EINTR) {
      wait_until(fd, POLLOUT, deadline, what);
    } else {
      fail(what);
    }
  }
}

// False when the other side has gone.
bool receive_all(int fd, std::span<std::byte> data, const Deadline& deadline, const std::string& what) {
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

template <class T>
std::span<std::byte> bytes_of(T& value) {
  return std::as_writable_bytes(std::span(&value, 1));
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
    if (!found) late(fmt::format("address {}: no answer from a name server", host));
    if (found->error == 0) return *found;
    std::this_thread::sleep_until(std::min(Clock::now() + kAskForNameAgain, until));
    if (Clock::now() >= until) late(fmt::format("address {}: {}", host, ::gai_strerror(found->error)));
  }
}

// On all interfaces; port 0: any free one. A socket of IPv6 is there for IPv4, too.
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
      if (errno == EADDRINUSE) fail(fmt::format("port {}", port));
    }
  }
  fail(fmt::format("port {}", port));
}

int port_of(const Socket& socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (::getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&address), &size) != 0) fail("own port");
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<sockaddr_in&>(address).sin_port);
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
  if (!socket.open() && errno != EAFNOSUPPORT) fail("a socket to " + whom);
  if (!socket.open()) return socket;
  set_options(socket.fd());
  const bool begun = ::connect(socket.fd(), address.ai_addr, address.ai_addrlen) == 0 || errno == EINPROGRESS;
  return begun ? std::move(socket) : Socket();
}

Socket connect_to(int rank, const std::string& host, int port, const Deadline& deadline) {
  const Addresses addresses = addresses_of(host, port, deadline.end());
  return connect_to_any(addresses.list.get(), fmt::format("rank {} at {}:{}", rank, host, port), deadline.end());
}

// Where somebody comes from, as others can use it; empty for this machine, whose loopback is another one elsewhere.
std::string address_of(const sockaddr_storage& from, socklen_t size) {
  char text[NI_MAXHOST] = {};
  ::getnameinfo(reinterpret_cast<const sockaddr*>(&from), size, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
  std::string_view address = text;
  constexpr std::string_view kMapped = "::ffff:";  // an address of IPv4 on a socket of IPv6
  if (address.starts_with(kMapped)) address.remove_prefix(kMapped.size());
  return address == "::1" || address.starts_with("127.") ? std::string() : std::string(address);
}

void require_same_version(const TcpGreeting& greeting, const std::string& who) {
  if (!is_of_other_version(greeting)) return;
  throw Unavailable(
      fmt::format("tcp_communicator: {} speaks version {} of the protocol, and this rank version {}; accepted: the "
                  "same version of treeattn on all ranks",
                  who, greeting.version, TcpGreeting::kVersion));
}

void require_same_job(const TcpCard& card, const TcpCard& mine, const std::string& who) {
  if (card.job == mine.job) return;
  throw Unavailable(
      fmt::format("tcp_communicator: {} is of {}, and this rank of {}; accepted: the same job (TREEATTN_JOB) on all "
                  "ranks",
                  who, name_job(card.job), name_job(mine.job)));
}

// Who has connected, and the card it shows, with the address it comes from.
struct Caller {
  Socket socket;
  TcpCard card;
};

// Those at the door. Anybody may knock, and who says nothing, or only half of it, must not keep the ranks waiting: all
// of them are listened to at once.
class Door {
 public:
  Door(const Socket& listening, const TcpCard& mine) : listening_(listening), mine_(mine) {}

  // The next one with a card of this job; what is none is sent away. missing: the ranks that are to come. Throws
  // Unavailable when the time is over, and for a card of another version.
  Caller next(const std::vector<int>& missing, const Deadline& deadline) {
    std::string what = absence_of(missing);
    for (;;) {
      const bool room = let_in(missing.size(), deadline, what);
      for (auto knock = knocks_.begin(); knock != knocks_.end();) {
        const bool there = listen_to(*knock);
        if (there && knock->have >= sizeof(TcpGreeting)) answer_other_version(*knock);
        if (there && knock->have < sizeof(TcpCard)) {
          ++knock;
          continue;
        }
        Knock one = std::move(*knock);
        knock = knocks_.erase(knock);
        if (!there || !is_sound(one.card)) continue;
        if (!is_of_this_job(one)) {
          what = absence_of(missing);
          continue;
        }
        put_text(one.card.address, one.address);
        return {std::move(one.socket), one.card};
      }
      if (room) {
        wait(deadline, what);
      } else if (knocks_.size() > missing.size()) {
        knocks_.erase(knocks_.begin());
      }
    }
  }

 private:
  struct Knock {
    Socket socket;
    std::string address;
    TcpCard card;
    std::size_t have = 0;  // bytes of the card
  };

  // False when this process may have no more open files, and not all who have them can be ranks: the one that has been
  // silent for longest must make room.
  bool let_in(std::size_t missing, const Deadline& deadline, const std::string& what) {
    for (;;) {
      if (deadline.over()) late(what);  // there may be no end of those who knock
      sockaddr_storage from{};
      socklen_t size = sizeof from;
      Socket socket(::accept(listening_.fd(), reinterpret_cast<sockaddr*>(&from), &size));
      if (socket.open()) {
        set_options(socket.fd());
        knocks_.push_back({std::move(socket), address_of(from, size), {}, 0});
      } else if (errno == EAGAIN) {
        return true;
      } else if (errno == EMFILE && knocks_.size() > missing) {
        return false;
      } else if (errno != EINTR && errno != ECONNABORTED) {
        fail(what);
      }
    }
  }

  // Takes what has come; false when the other side has gone.
  static bool listen_to(Knock& knock) {
    while (knock.have < sizeof(TcpCard)) {
      const auto rest = bytes_of(knock.card).subspan(knock.have);
      const ssize_t got = ::recv(knock.socket.fd(), rest.data(), rest.size(), 0);
      if (got <= 0) return got < 0 && (errno == EAGAIN || errno == EINTR);
      knock.have += static_cast<std::size_t>(got);
    }
    return true;
  }

  // The other side learns of it too. More than the greeting it may take for something else.
  static void answer_other_version(const Knock& knock) {
    const TcpGreeting mine;
    if (is_of_other_version(knock.card.greeting)) ::send(knock.socket.fd(), &mine, sizeof mine, MSG_NOSIGNAL);
    require_same_version(knock.card.greeting, "a rank " + place_of(knock));
  }

  // One that another run has left must not end this one: it is told, and named only where ranks do not come.
  bool is_of_this_job(const Knock& knock) {
    if (knock.card.job == mine_.job) return true;
    ::send(knock.socket.fd(), &mine_, kTcpRefusalBytes, MSG_NOSIGNAL);
    refused_ =
        fmt::format(" (rank {} {} did, of {}, and this is {}; accepted: the same job (TREEATTN_JOB) on all ranks)",
                    knock.card.rank, place_of(knock), name_job(knock.card.job), name_job(mine_.job));
    return false;
  }

  std::string absence_of(const std::vector<int>& missing) const {
    return fmt::format("{} of {} did not come{}", name_ranks(missing), mine_.size, refused_);
  }

  static std::string place_of(const Knock& knock) {
    return knock.address.empty() ? "of this machine" : "at " + knock.address;
  }

  void wait(const Deadline& deadline, const std::string& what) const {
    std::vector<pollfd> entries = {{listening_.fd(), POLLIN, 0}};
    for (const Knock& knock : knocks_) entries.push_back({knock.socket.fd(), POLLIN, 0});
    wait_until(entries, deadline, what);
  }

  const Socket& listening_;
  const TcpCard& mine_;
  std::string refused_;      // the last one of another job
  std::list<Knock> knocks_;  // there may be thousands, and any of them goes first
};

// Whose place is empty, of those from `first` on.
std::vector<int> missing_of(const std::vector<Socket>& sockets, std::size_t first) {
  std::vector<int> missing;
  for (std::size_t r = first; r < sockets.size(); ++r) {
    if (!sockets[r].open()) missing.push_back(static_cast<int>(r));
  }
  return missing;
}

// Whether the other side has closed the connection. It has nothing to say on it.
bool has_gone(const Socket& socket) {
  std::byte unread;
  const ssize_t got = ::recv(socket.fd(), &unread, 1, MSG_PEEK);
  return got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
}

// Rank 0: hears of everyone, then tells everyone of all. A rank that went away meanwhile (its own deadline was over)
// may be started again: its place is free.
std::vector<TcpCard> collect(const Socket& listening, const TcpCard& mine, const Deadline& deadline) {
  const auto size = static_cast<std::size_t>(mine.size);
  std::vector<TcpCard> cards(size);
  std::vector<Socket> others(size);
  cards[0] = mine;
  Door door(listening, mine);
  for (std::vector<int> missing; !(missing = missing_of(others, 1)).empty();) {
    auto [socket, card] = door.next(missing, deadline);
    require(card.size == mine.size && card.rank > 0 && card.rank < mine.size,
            "a rank {} of {} came to a group of {}; accepted: ranks 1 to {} of that size", card.rank, card.size,
            mine.size, mine.size - 1);
    for (Socket& other : others) {
      if (other.open() && has_gone(other)) other = Socket();
    }
    auto& place = others[static_cast<std::size_t>(card.rank)];
    require(!place.open(), "rank {} came twice; accepted: every RANK once", card.rank);
    cards[static_cast<std::size_t>(card.rank)] = card;
    place = std::move(socket);
  }
  for (std::size_t r = 1; r < size; ++r) {
    send_all(others[r].fd(), std::as_bytes(std::span(cards)), deadline, "table of ranks");
  }
  return cards;
}

std::vector<TcpCard> report(const TcpPlace& place, const TcpCard& mine, const Deadline& deadline) {
  std::vector<TcpCard> cards(static_cast<std::size_t>(mine.size));
  const Socket socket = connect_to(0, place.address, place.port, deadline);
  TcpCard card = mine;
  send_all(socket.fd(), bytes_of(card), deadline, "report to rank 0");
  const auto receive = [&](std::span<std::byte> part) {
    if (receive_all(socket.fd(), part, deadline, "no table of ranks from rank 0")) return;
    throw Unavailable("tcp_communicator: rank 0 has gone before all ranks had come");
  };
  const auto table = std::as_writable_bytes(std::span(cards));
  const std::string rank0 = fmt::format("rank 0 at {}:{}", place.address, place.port);
  receive(table.first(sizeof(TcpGreeting)));
  require_same_version(cards[0].greeting, rank0);
  receive(table.first(kTcpRefusalBytes).subspan(sizeof(TcpGreeting)));
  if (cards[0].greeting.magic == TcpGreeting::kMagic) require_same_job(cards[0], mine, rank0);
  receive(table.subspan(kTcpRefusalBytes));
  for (std::size_t r = 0; r < cards.size(); ++r) {
    const bool fits = is_sound(cards[r]) && cards[r].rank == static_cast<int>(r) && cards[r].size == mine.size &&
                      cards[r].job == mine.job;
    if (fits) continue;
    throw Unavailable(fmt::format(
        "tcp_communicator: {}:{} sent what is no table of ranks, at rank {}; accepted: one card for each of "
        "{} ranks",
        place.address, place.port, r, mine.size));
  }
  return cards;
}

}  // namespace

Socket::~Socket() {
  if (fd_ >= 0) ::close(fd_);
}

Socket& Socket::operator=(Socket&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
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
    if (Clock::now() >= until) late("no answer from " + whom);
    std::this_thread::sleep_for(kRetry);
  }
}

TcpMesh connect_mesh(const TcpPlace& place, Seconds within) {
  require(place.size >= 1 && place.size <= kMostTcpRanks, "size = {}; accepted: 1 to {}", place.size, kMostTcpRanks);
  require(place.rank >= 0 && place.rank < place.size, "rank = {}; accepted: 0 to {}", place.rank, place.size - 1);
  require(place.port >= 1 && place.port <= 65535, "port = {}; accepted: 1 to 65535", place.port);
  require_open_files(place.size);
  const Deadline deadline(within);
  const auto size = static_cast<std::size_t>(place.size);
  TcpMesh mesh;
  mesh.sockets.resize(size);
  mesh.machine.assign(size, base::machine_name());
  if (place.size == 1) return mesh;

  const Socket listening = listen_on(0);
  TcpCard mine;
  mine.rank = place.rank;
  mine.size = place.size;
  mine.port = port_of(listening);
  put_job(mine.job, place.job);
  put_text(mine.machine, mesh.machine.front());
  const std::vector<TcpCard> cards =
      place.rank == 0 ? collect(listen_on(place.port), mine, deadline) : report(place, mine, deadline);
  for (std::size_t r = 0; r < size; ++r) mesh.machine[r] = cards[r].machine.data();
  // The higher rank calls, the lower one answers.
  for (int r = 0; r < place.rank; ++r) {
    const TcpCard& other = cards[static_cast<std::size_t>(r)];
    const std::string address = other.address.data();
    Socket socket = connect_to(r, address.empty() ? place.address : address, other.port, deadline);
    TcpCard card = mine;
    send_all(socket.fd(), bytes_of(card), deadline, "greeting");
    mesh.sockets[static_cast<std::size_t>(r)] = std::move(socket);
  }
  Door door(listening, mine);
  const std::size_t first = static_cast<std::size_t>(place.rank) + 1;
  for (std::vector<int> missing; !(missing = missing_of(mesh.sockets, first)).empty();) {
    auto [socket, card] = door.next(missing, deadline);
    if (card.rank <= place.rank || card.rank >= place.size || card.size != place.size) continue;
    if (mesh.sockets[static_cast<std::size_t>(card.rank)].open()) continue;
    mesh.sockets[static_cast<std::size_t>(card.rank)] = std::move(socket);
  }
  return mesh;
}

}  // namespace treeattn::comm
