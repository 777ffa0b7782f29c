// SPDX-License-Identifier: Apache-2.0
// Who may come in: the ranks of this run, of everybody who connects.
#pragma once

#include <cstddef>
#include <list>
#include <string>
#include <vector>

#include "comm/tcp_card.h"
#include "comm/tcp_socket.h"

namespace treeattn::comm {

// Throw Unavailable, which names both sides.
void require_same_version(const TcpGreeting& greeting, const std::string& who);
void require_same_job(const TcpCard& card, const TcpCard& mine, const std::string& who);

// Who has connected, and the card it shows, with the address it comes from.
struct Caller {
  Socket socket;
  TcpCard card;
};

// Those at the door. Anybody may knock, and who says nothing, or only half of it, must not keep the ranks waiting: all
// of them are listened to at once.
class Door {
 public:
  // Both must outlive it.
  Door(const Socket& listening, const TcpCard& mine) : listening_(listening), mine_(mine) {}

  // The next one with a card of this job; what is none is sent away. missing: the ranks that are to come. Throws
  // Unavailable when the time is over, and for a card of another version.
  Caller next(const std::vector<int>& missing, const TcpDeadline& deadline);

 private:
  struct Knock {
    Socket socket;
    std::string address;
    TcpCard card;
    std::size_t have = 0;  // bytes of the card
  };

  bool let_in(std::size_t missing, const TcpDeadline& deadline, const std::string& what);
  static bool listen_to(Knock& knock);
  static void answer_other_version(const Knock& knock);
  bool is_of_this_job(const Knock& knock);
  std::string absence_of(const std::vector<int>& missing) const;
  static std::string place_of(const Knock& knock);
  void wait(const TcpDeadline& deadline, const std::string& what) const;

  const Socket& listening_;
  const TcpCard& mine_;
  std::string refused_;      // the last one of another job
  std::list<Knock> knocks_;  // there may be thousands, and any of them goes first
};

}  // namespace treeattn::comm
