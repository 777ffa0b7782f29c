// SPDX-License-Identifier: Apache-2.0
// The inside of a Communicator: a list of the transport's ranks and a context, whose tags no other group of two of
// these ranks has. So split() and shrink() make groups out of numbers alone.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/buffer.h"
#include "comm/roll_call.h"
#include "comm/transport.h"
#include "treeattn/communicator.h"

namespace treeattn {

namespace comm {

// A call that depends on others: what to name in the error, and how long it may take.
struct Call {
  std::string_view name;
  Instant start;
  Seconds deadline;
};

// Tags of a context: neither a collective nor a call that is made of messages may take one that was sent by hand.
enum class Channel : int { kPointToPoint, kInCall, kCollective };
inline constexpr int kChannels = 3;
inline constexpr int kMaxContext = (Transport::kMaxTag + 1) / kChannels - 1;
// Of what another rank says about the groups it has had: Endpoint::next_context.
inline bool may_be_next_context(int context) { return context >= 0 && context <= kMaxContext + 1; }
inline int tag_of(int context, Channel channel) { return kChannels * context + static_cast<int>(channel); }

// More than the clock can count to.
inline constexpr Seconds kLongestDeadline{1e9};
// Throws InvalidArgument unless it is a number above 0.
Seconds checked(Seconds deadline);

}  // namespace comm

struct Communicator::Impl {
  // split: the members, where they are not the whole family.
  Impl(std::shared_ptr<comm::Endpoint> endpoint, std::shared_ptr<comm::Family> family, std::vector<int> split,
       int context, Seconds deadline);

  int size() const { return static_cast<int>(members.size()); }
  comm::Transport& transport() const { return *endpoint->transport(); }
  // Throws InvalidArgument unless 0 <= rank < size.
  void check_rank(int other, std::string_view name) const;
  // Throws InvalidArgument where it is under way on another transport, which alone can tell what became of it, or in
  // another family: to wait for a rank that is not in this one would break this one.
  void check_request(const Request& request) const;

  // Throws LostRanks if the family is broken, or breaks.
  comm::Call begin(std::string_view name, std::optional<Seconds> deadline);
  Request send(comm::Channel channel, int to, std::span<const std::byte> data, std::shared_ptr<const void> owner);
  void count_sent(int to, std::size_t bytes);
  Request receive(comm::Channel channel, int from, std::span<std::byte> data, std::shared_ptr<const void> owner);
  // The same with arguments of a caller. Throw InvalidArgument, and LostRanks if the family is broken.
  Request checked_send(comm::Channel channel, int to, std::span<const std::byte> data,
                       std::shared_ptr<const void> owner);
  Request checked_receive(comm::Channel channel, int from, std::span<std::byte> data, std::shared_ptr<void> owner);
  // Until all are done.
  void finish(std::span<Request> requests, const comm::Call& call);
  // Holds the roll call to its end.
  [[noreturn]] void give_up(const comm::Call& call, int waits_for);
  void find_lost();
  [[noreturn]] void throw_lost(std::string_view name, Seconds within);

  // Collectives work in memory of their own: it outlives a call that throws, the caller's may not.
  std::span<std::byte> scratch(std::size_t bytes);

  // By doubling distances. A rank leaves when every rank has come, and not before.
  void allgather(std::span<const std::byte> mine, std::span<std::byte> all, const comm::Call& call);

  const std::shared_ptr<comm::Endpoint> endpoint;
  const std::shared_ptr<comm::Family> family;
  const std::vector<int> split;
  const std::vector<int>& members;  // [size] the transport's number of each rank
  const int context;
  int rank = 0;
  std::vector<int> nodes;  // [size]
  int node_count = 0;
  Seconds deadline;
  Traffic traffic;
  std::vector<int> lost;
  int shrunk = 0;  // groups made by shrink()
  std::shared_ptr<base::Buffer> buffer;
};

}  // namespace treeattn
