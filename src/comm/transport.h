// SPDX-License-Identifier: Apache-2.0
// What a transport has to do: pass bytes between ranks without ever waiting. Groups, collectives, deadlines and lost
// ranks are built on it once, in communicator.cc and roll_call.cc.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace treeattn::comm {

class Transport;

// A message under way, as the transport sees it. Derived from by each transport. It owns (shares) its buffer, so that a
// message that is given up can stay where the other side, or the network, may still touch it.
struct Operation {
  virtual ~Operation() = default;
  std::shared_ptr<const void> owner;
  // Filled in by the communicator: who is to give it up, the transport's number of the other rank, and the family of
  // groups that it is of, by its context.
  std::shared_ptr<Transport> transport;
  int peer = -1;
  int family = -1;
};

// From whom it is, the transport knows; what it says, nobody has looked at yet.
struct ReceivedNote {
  int from = 0;
  std::vector<std::byte> bytes;
};

// One rank's end of it. Not thread-safe.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual std::string_view name() const = 0;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const std::vector<int>& nodes() const = 0;  // [size] node of each rank, as numbered by the transport

  // Messages of one (from, to, tag) arrive in order. 0 <= tag <= kMaxTag.
  static constexpr int kMaxTag = 32767;
  virtual std::shared_ptr<Operation> send(int to, int tag, std::span<const std::byte> data,
                                          std::shared_ptr<const void> owner) = 0;
  virtual std::shared_ptr<Operation> receive(int from, int tag, std::span<std::byte> data,
                                             std::shared_ptr<const void> owner) = 0;
  // Moves messages along, without waiting; true when this one is done. Throws Error when the sizes of a send and its
  // receive differ, and when a rank has sent what none sends: that one is gone from then on.
  virtual bool test(Operation& operation) = 0;
  // Gives a message up: the transport keeps what it needs of it until that is safe. It may arrive or not; nothing sent
  // later is taken for it.
  virtual void abandon(std::shared_ptr<Operation> operation) = 0;
  // Nobody will ask for messages of the tags [first, first + count) any more: a transport that can drops what came of
  // them and what comes.
  virtual void forget(int first, int count) = 0;

  // Notes: short, apart from all tags, sent and forgotten, read in the order they came from whoever sent them. Notes of
  // one rank stay in order. next_note() throws Error as test() does.
  static constexpr std::size_t kMaxNoteBytes = std::size_t{1} << 20;
  virtual void send_note(int to, std::vector<std::byte> note) = 0;
  virtual std::optional<ReceivedNote> next_note() = 0;

  // Waits a moment in the way that suits the transport: until something may have changed. `idle` counts the calls in a
  // row that found nothing, so that a long wait can sleep.
  virtual void pause(int idle) = 0;
  // Whether a rank is known to be gone for good (its thread has ended). What it sent before is still delivered. A
  // transport that cannot tell says no.
  virtual bool gone(int rank) const = 0;
  // These have been lost: nothing is waited for from them, and whatever needs all ranks (MPI_Finalize) must not be done
  // any more.
  virtual void mark_lost(const std::vector<int>& ranks) = 0;
};

}  // namespace treeattn::comm
