// SPDX-License-Identifier: Apache-2.0
#include "comm/tcp_mesh.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <cerrno>
#include <span>
#include <utility>

#include "base/check.h"
#include "base/machine.h"
#include "comm/roll_call.h"
#include "comm/tcp_card.h"
#include "comm/tcp_door.h"
#include "treeattn/error.h"

namespace treeattn::comm {
namespace {

using base::require;

// Said before anybody is waited for: a connection to every other rank, and one file to listen with.
void require_open_files(int size) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur > static_cast<rlim_t>(size)) return;
  throw Unavailable(
      fmt::format("tcp_communicator: size = {}, with a connection to every other rank, and this process may open {} "
                  "files; accepted: a limit (ulimit -n) some files above the size",
                  size, limit.rlim_cur));
}

template <class T>
std::span<std::byte> bytes_of(T& value) {
  return std::as_writable_bytes(std::span(&value, 1));
}

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

// Wherever there is room, but not where rank 0 is to be found: it may not be there yet.
Socket listen_beside(int port) {
  Socket socket = listen_on(0);
  return port_of(socket) == port ? listen_on(0) : std::move(socket);
}

// The rank on the card of who has not come, in a table that is sent all the same: who waits for it shall not have to
// guess.
constexpr std::int32_t kAbsent = -1;

// Rank 0: hears of everyone, then tells everyone of all. A rank that went away meanwhile (its own deadline was over)
// may be started again: its place is free.
std::vector<TcpCard> collect(const Socket& listening, const TcpCard& mine, const TcpDeadline& deadline) {
  const auto size = static_cast<std::size_t>(mine.size);
  std::vector<TcpCard> cards(size);
  std::vector<Socket> others(size);
  cards[0] = mine;
  Door door(listening, mine);
  const auto next = [&](const std::vector<int>& missing) {
    try {
      return door.next(missing, deadline);
    } catch (const Unavailable&) {
      for (const int r : missing) cards[static_cast<std::size_t>(r)].rank = kAbsent;
      const auto table = std::as_bytes(std::span(cards));
      for (const Socket& other : others) {
        if (other.open()) ::send(other.fd(), table.data(), table.size(), MSG_NOSIGNAL);
      }
      throw;
    }
  };
  for (std::vector<int> missing; !(missing = missing_of(others, 1)).empty();) {
    auto [socket, card] = next(missing);
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

std::vector<TcpCard> report(const TcpPlace& place, const TcpCard& mine, const TcpDeadline& deadline) {
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
  std::vector<int> missing;
  for (std::size_t r = 0; r < cards.size(); ++r) {
    if (cards[r].rank == kAbsent) missing.push_back(static_cast<int>(r));
  }
  if (!missing.empty()) {
    throw Unavailable(
        fmt::format("tcp_communicator: {} of {} did not come, says rank 0", name_ranks(missing), mine.size));
  }
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

TcpMesh connect_mesh(const TcpPlace& place, Seconds within) {
  require(place.size >= 1 && place.size <= kMostTcpRanks, "size = {}; accepted: 1 to {}", place.size, kMostTcpRanks);
  require(place.rank >= 0 && place.rank < place.size, "rank = {}; accepted: 0 to {}", place.rank, place.size - 1);
  require(place.port >= 1 && place.port <= 65535, "port = {}; accepted: 1 to 65535", place.port);
  require_open_files(place.size);
  const TcpDeadline deadline(within);
  const auto size = static_cast<std::size_t>(place.size);
  TcpMesh mesh;
  mesh.sockets.resize(size);
  mesh.machine.assign(size, base::machine_name());
  if (place.size == 1) return mesh;

  const Socket listening = listen_beside(place.port);
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
