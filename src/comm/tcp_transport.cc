// SPDX-License-Identifier: Apache-2.0
// Ranks that are processes connected by TCP: one connection for every two ranks, no thread of its own. Whoever tests or
// waits moves all messages along.
#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <deque>
#include <exception>
#include <limits>
#include <new>
#include <set>
#include <utility>

#include "base/available_memory.h"
#include "base/sent.h"
#include "comm/group.h"
#include "comm/tcp_header.h"
#include "comm/tcp_mesh.h"
#include "comm/topology.h"
#include "comm/transport.h"
#include "treeattn/communicator.h"
#include "treeattn/error.h"

namespace treeattn::comm {
namespace {

// Smaller ones are copied when they are sent, and done.
constexpr std::size_t kCopyUpTo = std::size_t{64} << 10;
// Room that is made for a message nobody has asked for because its header says so. Beyond that, as much as has come.
constexpr std::size_t kBelievedBytes = std::size_t{16} << 20;
// What has come and nobody has asked for yet may take up half of the memory that there is when the ranks meet, and at
// least so much: far more than a rank that is some calls ahead sends. Whoever sends without end would take all of it.
constexpr std::size_t kLeastUnasked = std::size_t{256} << 20;
// Read from one rank before the others have their turn, and the caller a look at its deadline. Many small messages take
// as long as much data.
constexpr std::size_t kTurnBytes = std::size_t{64} << 20;
constexpr int kTurnMessages = 1024;
// How often a waiting rank polls without sleeping, and how long it then sleeps at most.
constexpr int kPolls = 64;
constexpr int kNapMilliseconds = 5;

struct TcpSend final : Operation {
  bool done = false;
};

struct TcpReceive final : Operation {
  int from = 0;
  int tag = 0;
  std::span<std::byte> data;
  bool done = false;
  bool wrong_size = false;
  std::size_t came = 0;  // bytes of a message of another size
};

// A message on its way out. `copy` is used where the sender's memory may go before it is sent.
struct Outgoing {
  TcpHeader header;
  std::span<const std::byte> data;
  std::vector<std::byte> copy;
  std::shared_ptr<TcpSend> operation;  // null: a note, or copied
  std::size_t sent = 0;                // header included
};

// A message that nobody has asked for yet.
struct Unasked {
  int tag = 0;
  bool given_up = false;
  std::vector<std::byte> data;
  std::size_t held = 0;  // of Peer::unasked_bytes; what a rank sends to itself is no part of them
};

// One connection.
struct Peer {
  Socket socket;
  std::deque<Outgoing> out;
  std::deque<Unasked> unasked;
  std::size_t unasked_bytes = 0;  // that `unasked` and `content` take up, and notes that nobody has read
  bool gone = false;
  bool lost = false;  // nothing is waited for from it, though it may not have gone

  // The message that is coming in.
  TcpHeader header;
  std::size_t header_bytes = 0;   // of it, that are here
  std::size_t data_bytes = 0;     // of its content
  TcpReceive* receive = nullptr;  // where the content goes; null: to `content`
  std::vector<std::byte> content;
  std::size_t held = 0;  // of unasked_bytes, for it
};

class TcpTransport final : public Transport {
 public:
  TcpTransport(int rank, TcpMesh mesh, const std::vector<int>& nodes, Seconds flush_for)
      : rank_(rank), flush_for_(flush_for), peers_(mesh.sockets.size()) {
    std::vector<int> found(mesh.machine.size());
    for (std::size_t r = 0; r < found.size(); ++r) {
      const auto same = std::find(mesh.machine.begin(), mesh.machine.end(), mesh.machine[r]);
      found[r] = static_cast<int>(same - mesh.machine.begin());
      peers_[r].socket = std::move(mesh.sockets[r]);
    }
    nodes_ = choose_nodes(nodes, found);
  }

  // What is with the kernel is delivered. What a busy receiver has left no room for, and is done for its sender, is
  // still here.
  ~TcpTransport() override {
    const Instant end = after(Clock::now(), flush_for_);
    const auto waiting = [&] {
      return std::any_of(peers_.begin(), peers_.end(),
                         [](const Peer& p) { return !p.gone && !p.lost && !p.out.empty(); });
    };
    while (waiting() && Clock::now() < end) {
      move_all_quietly();
      wait(1);
    }
    // A connection closed with unread bytes would take back what the other side has not read yet.
    move_all_quietly(std::numeric_limits<int>::max());
  }

  std::string_view name() const override { return "tcp"; }
  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(peers_.size()); }
  const std::vector<int>& nodes() const override { return nodes_; }

  std::shared_ptr<Operation> send(int to, int tag, std::span<const std::byte> data,
                                  std::shared_ptr<const void> owner) override {
    auto operation = std::make_shared<TcpSend>();
    operation->owner = std::move(owner);
    if (to == rank_) {
      deliver(peers_[index(to)], to, {tag, false, {data.begin(), data.end()}, 0});
      operation->done = true;
      return operation;
    }
    Outgoing message;
    message.header = {tag, 0, data.size()};
    message.data = data;
    if (data.size() <= kCopyUpTo) {
      message.copy.assign(data.begin(), data.end());
      message.data = message.copy;
      operation->done = true;
    } else {
      message.operation = operation;
    }
    push(to, std::move(message));
    return operation;
  }

  std::shared_ptr<Operation> receive(int from, int tag, std::span<std::byte> data,
                                     std::shared_ptr<const void> owner) override {
    auto operation = std::make_shared<TcpReceive>();
    operation->owner = std::move(owner);
    operation->from = from;
    operation->tag = tag;
    operation->data = data;
    Peer& peer = peers_[index(from)];
    auto& unasked = peer.unasked;
    const auto found =
        std::find_if(unasked.begin(), unasked.end(), [&](const Unasked& message) { return message.tag == tag; });
    if (found == unasked.end()) {
      posted_.push_back(operation.get());
    } else {
      hand_over(*operation, *found);
      release(peer, found->held);
      unasked.erase(found);
    }
    return operation;
  }

  bool test(Operation& operation) override {
    if (is_done(operation)) return true;
    move_all();
    return is_done(operation);
  }

  void abandon(std::shared_ptr<Operation> operation) override {
    if (auto* receiving = dynamic_cast<TcpReceive*>(operation.get())) {
      std::erase(posted_, receiving);
      Peer& peer = peers_[index(receiving->from)];
      if (peer.receive != receiving) return;
      // Half of it is here: the rest goes nowhere.
      peer.receive = nullptr;
      peer.header.tag = kDropped;
      return;
    }
    for (Peer& peer : peers_) {
      const auto found = std::find_if(peer.out.begin(), peer.out.end(),
                                      [&](const Outgoing& message) { return message.operation == operation; });
      if (found == peer.out.end()) continue;
      if (found->sent == 0) {
        found->header = {found->header.tag, 1, 0};
        found->data = {};
        found->operation.reset();
      } else {
        end_without_sender(peer, *found);
      }
      return;
    }
  }

  void forget(int first, int count) override {
    for (int tag = first; tag < first + count; ++tag) forgotten_.insert(tag);
    for (Peer& peer : peers_) {
      std::erase_if(peer.unasked, [&](const Unasked& message) {
        if (!forgotten_.contains(message.tag)) return false;
        release(peer, message.held);
        return true;
      });
      if (peer.held == 0 || !forgotten_.contains(peer.header.tag)) continue;
      drop_content(peer);
      peer.header.tag = kDropped;
    }
  }

  void send_note(int to, std::vector<std::byte> note) override {
    if (to == rank_) return notes_.push_back({rank_, std::move(note)});
    Outgoing message;
    message.header = {TcpHeader::kNote, 0, note.size()};
    message.copy = std::move(note);
    message.data = message.copy;
    push(to, std::move(message));
  }

  std::optional<ReceivedNote> next_note() override {
    if (notes_.empty()) move_all();
    if (notes_.empty()) return {};
    ReceivedNote note = std::move(notes_.front());
    notes_.pop_front();
    if (note.from != rank_) release(peers_[index(note.from)], sizeof(Unasked) + note.bytes.size());
    return note;
  }

  void pause(int idle) override {
    if (idle >= kPolls) wait(kNapMilliseconds);
  }

  bool gone(int rank) const override { return peers_[index(rank)].gone; }
  void mark_lost(const std::vector<int>& ranks) override {
    for (const int rank : ranks) peers_[index(rank)].lost = true;
  }

 private:
  static constexpr std::int32_t kDropped = -2;

  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }

  static bool is_done(const Operation& operation) {
    if (const auto* sending = dynamic_cast<const TcpSend*>(&operation)) return sending->done;
    const auto& receiving = static_cast<const TcpReceive&>(operation);
    if (receiving.wrong_size) {
      throw Error(
          fmt::format("receive of {} bytes met a message of {} bytes from transport rank {}; accepted: the size that "
                      "was sent",
                      receiving.data.size(), receiving.came, receiving.from));
    }
    return receiving.done;
  }

  void push(int to, Outgoing message) {
    Peer& peer = peers_[index(to)];
    if (peer.gone) return;  // it will never be done
    peer.out.push_back(std::move(message));
    // The span of a small message points into its own copy, which has moved with it.
    Outgoing& last = peer.out.back();
    if (last.operation == nullptr) last.data = last.copy;
    write_to(peer);
  }

  // It has begun, so it must be ended. Called by a destructor: where there is no memory for a copy the owner keeps the
  // sender's, and without an owner nothing more can be sent there.
  void end_without_sender(Peer& peer, Outgoing& message) {
    try {
      message.copy.assign(message.data.begin(), message.data.end());
      message.data = message.copy;
      message.operation.reset();
    } catch (const std::bad_alloc&) {
      if (message.operation->owner == nullptr) lose(peer);
    }
  }

  void move_all(int turn_messages = kTurnMessages) {
    for (std::size_t r = 0; r < peers_.size(); ++r) {
      if (r == index(rank_) || peers_[r].gone) continue;
      write_to(peers_[r]);
      read_from(peers_[r], static_cast<int>(r), turn_messages);
    }
  }

  // For the destructor. What another rank has sent, or that there is no memory for it, ends no process.
  void move_all_quietly(int turn_messages = kTurnMessages) {
    try {
      move_all(turn_messages);
    } catch (const std::exception&) {
    }
  }

  void wait(int milliseconds) {
    std::vector<pollfd> entries;
    for (const Peer& peer : peers_) {
      if (!peer.socket.open() || peer.gone) continue;
      entries.push_back({peer.socket.fd(), static_cast<short>(peer.out.empty() ? POLLIN : POLLIN | POLLOUT), 0});
    }
    ::poll(entries.data(), entries.size(), milliseconds);
  }

  void lose(Peer& peer) {
    peer.gone = true;
    peer.out.clear();
    peer.receive = nullptr;
    drop_content(peer);
  }

  void write_to(Peer& peer) {
    while (!peer.gone && !peer.out.empty()) {
      Outgoing& message = peer.out.front();
      const auto head = std::as_bytes(std::span(&message.header, 1));
      const std::size_t at = message.sent;
      const bool in_head = at < head.size();
      // The two as one, so that a small message is one packet.
      iovec parts[2];
      parts[0] = {const_cast<std::byte*>(in_head ? head.data() + at : head.data()), in_head ? head.size() - at : 0};
      const std::size_t from = in_head ? 0 : at - head.size();
      parts[1] = {const_cast<std::byte*>(message.data.data() + from), message.data.size() - from};
      msghdr packet{};
      packet.msg_iov = parts;
      packet.msg_iovlen = 2;
      const ssize_t sent = ::sendmsg(peer.socket.fd(), &packet, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent < 0) {
        if (errno != EAGAIN && errno != EINTR) stop_sending(peer);
        return;
      }
      message.sent += static_cast<std::size_t>(sent);
      if (message.sent < head.size() + message.data.size()) return;
      if (message.operation != nullptr) message.operation->done = true;
      peer.out.pop_front();
    }
  }

  // It is not there to read any more, but what it sent may still be to be had: read_from finds the end.
  static void stop_sending(Peer& peer) { peer.out.clear(); }

  void read_from(Peer& peer, int from, int turn_messages) {
    std::size_t read = 0;
    for (int messages = 0; messages < turn_messages && read < kTurnBytes; ++messages) {
      if (peer.header_bytes < sizeof(TcpHeader)) {
        auto head = std::as_writable_bytes(std::span(&peer.header, 1)).subspan(peer.header_bytes);
        const std::size_t got = take(peer, head);
        if (got == 0) return;
        read += got;
        peer.header_bytes += got;
        if (peer.header_bytes < sizeof(TcpHeader)) return;
        check_or_lose(peer, from);
        begin_content(peer, from);
      }
      while (peer.data_bytes < peer.header.bytes) {
        const std::size_t got = take(peer, room_for_next(peer));
        if (got == 0) return;
        read += got;
        peer.data_bytes += got;
        if (read >= kTurnBytes && peer.data_bytes < peer.header.bytes) return;
      }
      end_content(peer, from);
    }
  }

  // Where the next message begins after one that nobody sends, nobody knows.
  void check_or_lose(Peer& peer, int from) {
    try {
      check_header(from, peer.header);
    } catch (const Error&) {
      lose(peer);
      throw;
    }
  }

  std::span<std::byte> room_for_next(Peer& peer) {
    const std::size_t left = peer.header.bytes - peer.data_bytes;
    if (peer.header.tag == kDropped) return std::span(dropped_).first(std::min(left, dropped_.size()));
    if (peer.receive != nullptr) return peer.receive->data.subspan(peer.data_bytes);
    if (peer.data_bytes == peer.content.size()) {
      const std::size_t more = std::min(left, std::max(peer.data_bytes, kBelievedBytes));
      require_room(more);
      peer.content.resize(peer.data_bytes + more);
      hold_content(peer, more);
    }
    return std::span(peer.content).subspan(peer.data_bytes);
  }

  // Bytes that are there already; 0 for none, or none ever again.
  std::size_t take(Peer& peer, std::span<std::byte> to) {
    const ssize_t got = ::recv(peer.socket.fd(), to.data(), to.size(), MSG_DONTWAIT);
    if (got > 0) return static_cast<std::size_t>(got);
    if (got == 0 || (errno != EAGAIN && errno != EINTR)) lose(peer);
    return 0;
  }

  // Straight to where it is wanted, if that is known; nowhere, if the size is wrong there.
  void begin_content(Peer& peer, int from) {
    peer.data_bytes = 0;
    peer.receive = nullptr;
    if (forgotten_.contains(peer.header.tag)) {
      peer.header.tag = kDropped;
      return;
    }
    const auto found = find_posted(from, peer.header.tag);
    if (found == posted_.end() || peer.header.given_up != 0) {
      hold_content(peer, sizeof(Unasked));
      return require_room(0);
    }
    TcpReceive& receiving = **found;
    posted_.erase(found);
    if (receiving.data.size() == peer.header.bytes) {
      peer.receive = &receiving;
    } else {
      refuse_size(receiving, peer.header.bytes);
      peer.header.tag = kDropped;
    }
  }

  void end_content(Peer& peer, int from) {
    peer.header_bytes = 0;
    const std::size_t held = std::exchange(peer.held, 0);
    if (peer.receive != nullptr) {
      std::exchange(peer.receive, nullptr)->done = true;
    } else if (peer.header.tag == TcpHeader::kNote) {
      notes_.push_back({from, std::move(peer.content)});
    } else if (peer.header.tag != kDropped) {
      deliver(peer, from, {peer.header.tag, peer.header.given_up != 0, std::move(peer.content), held});
    }
    peer.content = {};
  }

  std::vector<TcpReceive*>::iterator find_posted(int from, int tag) {
    return std::find_if(posted_.begin(), posted_.end(),
                        [&](const TcpReceive* one) { return one->from == from && one->tag == tag; });
  }

  void deliver(Peer& peer, int from, Unasked message) {
    const auto found = find_posted(from, message.tag);
    if (found == posted_.end()) {
      peer.unasked.push_back(std::move(message));
      return;
    }
    hand_over(**found, message);
    posted_.erase(found);
    release(peer, message.held);
  }

  void hold_content(Peer& peer, std::size_t bytes) {
    peer.held += bytes;
    peer.unasked_bytes += bytes;
    unasked_bytes_ += bytes;
  }
  void drop_content(Peer& peer) {
    peer.content = {};
    release(peer, std::exchange(peer.held, 0));
  }
  void release(Peer& peer, std::size_t bytes) {
    peer.unasked_bytes -= bytes;
    unasked_bytes_ -= bytes;
  }

  // For so many bytes more that nobody has asked for. Where there is none, the rank that has sent the most is given up,
  // and what it sent.
  void require_room(std::size_t more) {
    if (unasked_bytes_ + more <= most_unasked_) return;
    const auto most = std::max_element(peers_.begin(), peers_.end(),
                                       [](const Peer& a, const Peer& b) { return a.unasked_bytes < b.unasked_bytes; });
    const auto from = static_cast<int>(most - peers_.begin());
    const std::size_t sent = most->unasked_bytes;
    lose(*most);
    most->unasked.clear();
    std::erase_if(notes_, [&](const ReceivedNote& note) { return note.from == from; });
    release(*most, most->unasked_bytes);
    base::require_sent(false, from, "{} bytes that nobody has asked for; accepted: {} of all ranks together", sent,
                       most_unasked_);
  }

  // A receive that meets a message that was given up is never done.
  static void hand_over(TcpReceive& receiving, const Unasked& message) {
    if (message.given_up) return;
    const std::vector<std::byte>& data = message.data;
    if (data.size() != receiving.data.size()) return refuse_size(receiving, data.size());
    if (!data.empty()) std::memcpy(receiving.data.data(), data.data(), data.size());
    receiving.done = true;
  }

  static void refuse_size(TcpReceive& receiving, std::size_t came) {
    receiving.wrong_size = true;
    receiving.came = came;
  }

  const int rank_;
  const Seconds flush_for_;
  std::vector<Peer> peers_;  // [size]
  std::vector<int> nodes_;
  std::vector<TcpReceive*> posted_;  // not done and not coming in, as they were asked for
  std::set<int> forgotten_;          // tags
  std::deque<ReceivedNote> notes_;
  const std::size_t most_unasked_ = std::max(kLeastUnasked, base::available_memory().value_or(0) / 2);
  std::size_t unasked_bytes_ = 0;             // of all peers
  std::array<std::byte, kCopyUpTo> dropped_;  // what nobody wants, one piece over the other
};

}  // namespace
}  // namespace treeattn::comm

namespace treeattn {

std::shared_ptr<Communicator> tcp_communicator(const TcpPlace& place, RankOptions options) {
  const Seconds deadline = comm::checked(options.deadline);
  auto transport =
      std::make_shared<comm::TcpTransport>(place.rank, comm::connect_mesh(place, deadline), options.nodes, deadline);
  auto communicator = std::make_shared<Communicator>(std::move(transport));
  communicator->set_deadline(options.deadline);
  return communicator;
}

}  // namespace treeattn
