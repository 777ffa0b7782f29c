// SPDX-License-Identifier: Apache-2.0
#include "comm/tcp_door.h"

#include <fmt/format.h>
#include <poll.h>

#include <cerrno>
#include <span>
#include <utility>

#include "comm/roll_call.h"
#include "treeattn/error.h"

namespace treeattn::comm {

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

Caller Door::next(const std::vector<int>& missing, const TcpDeadline& deadline) {
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

// False when this process may have no more open files, and not all who have them can be ranks: the one that has been
// silent for longest must make room.
bool Door::let_in(std::size_t missing, const TcpDeadline& deadline, const std::string& what) {
  for (;;) {
    if (deadline.over()) throw_late(what);  // there may be no end of those who knock
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
      throw_tcp(what);
    }
  }
}

// Takes what has come; false when the other side has gone.
bool Door::listen_to(Knock& knock) {
  while (knock.have < sizeof(TcpCard)) {
    const auto rest = std::as_writable_bytes(std::span(&knock.card, 1)).subspan(knock.have);
    const ssize_t got = ::recv(knock.socket.fd(), rest.data(), rest.size(), 0);
    if (got <= 0) return got < 0 && (errno == EAGAIN || errno == EINTR);
    knock.have += static_cast<std::size_t>(got);
  }
  return true;
}

// The other side learns of it too. More than the greeting it may take for something else.
void Door::answer_other_version(const Knock& knock) {
  const TcpGreeting mine;
  if (is_of_other_version(knock.card.greeting)) ::send(knock.socket.fd(), &mine, sizeof mine, MSG_NOSIGNAL);
  require_same_version(knock.card.greeting, "a rank " + place_of(knock));
}

// One that another run has left must not end this one: it is told, and named only where ranks do not come.
bool Door::is_of_this_job(const Knock& knock) {
  if (knock.card.job == mine_.job) return true;
  ::send(knock.socket.fd(), &mine_, kTcpRefusalBytes, MSG_NOSIGNAL);
  refused_ = fmt::format(" (rank {} {} did, of {}, and this is {}; accepted: the same job (TREEATTN_JOB) on all ranks)",
                         knock.card.rank, place_of(knock), name_job(knock.card.job), name_job(mine_.job));
  return false;
}

std::string Door::absence_of(const std::vector<int>& missing) const {
  return fmt::format("{} of {} did not come{}", name_ranks(missing), mine_.size, refused_);
}

std::string Door::place_of(const Knock& knock) {
  return knock.address.empty() ? "of this machine" : "at " + knock.address;
}

void Door::wait(const TcpDeadline& deadline, const std::string& what) const {
  std::vector<pollfd> entries = {{listening_.fd(), POLLIN, 0}};
  for (const Knock& knock : knocks_) entries.push_back({knock.socket.fd(), POLLIN, 0});
  wait_until(entries, deadline, what);
}

}  // namespace treeattn::comm
