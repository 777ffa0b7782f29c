// SPDX-License-Identifier: Apache-2.0
#include "parallel/ring_pass.h"

#include <algorithm>

#include "plan/shares.h"

namespace treeattn::parallel {
namespace {

// The messages that fill and empty a slot.
struct Slot {
  std::vector<Request> receives;
  std::vector<Request> sends;
};

}  // namespace

RingPlace::RingPlace(const Communicator& communicator) : ring_(plan::ranks_by_node(communicator.node_of_rank())) {
  place_ = static_cast<int>(std::find(ring_.begin(), ring_.end(), communicator.rank()) - ring_.begin());
}

int RingPlace::before(int steps) const {
  const int size = static_cast<int>(ring_.size());
  return ring_[static_cast<std::size_t>(((place_ - steps) % size + size) % size)];
}

void pass_round(Communicator& communicator, const RingPlace& place, const RingPieces& pieces, RingLoad& load) {
  const std::size_t incoming = pieces.incoming.size();
  std::vector<Slot> slots(pieces.slots());
  std::size_t posted = 0;
  const auto slot_of = [&](std::size_t piece) { return piece % slots.size(); };
  // A slot takes its next piece once the last one has been worked on and sent on.
  const auto post_receives = [&](std::size_t worked_on) {
    while (posted < incoming && posted < worked_on + slots.size()) {
      Slot& slot = slots[slot_of(posted)];
      communicator.wait_all(slot.sends);
      slot.sends.clear();
      slot.receives = load.receive(posted, slot_of(posted));
      ++posted;
    }
  };
  const auto keep_moving = [&] {
    for (Slot& slot : slots) {
      for (Request& request : slot.receives) communicator.test(request);
    }
  };

  post_receives(0);
  std::vector<std::vector<Request>> own_sends;
  if (communicator.size() > 1) {
    for (std::size_t i = 0; i < pieces.own; ++i) own_sends.push_back(load.send_own(i));
  }
  for (std::size_t i = 0; i < pieces.own; ++i) {
    load.work_on_own(i);
    keep_moving();
  }
  for (std::size_t i = 0; i < incoming; ++i) {
    post_receives(i);
    Slot& slot = slots[slot_of(i)];
    communicator.wait_all(slot.receives);
    slot.receives.clear();
    if (pieces.incoming[i] != place.right()) slot.sends = load.send(i, slot_of(i));
    load.work_on(i, slot_of(i));
    keep_moving();
  }
  for (Slot& slot : slots) communicator.wait_all(slot.sends);
  for (auto& sends : own_sends) communicator.wait_all(sends);
  for (int step = 1; step < communicator.size(); ++step) communicator.count_step();
}

}  // namespace treeattn::parallel
