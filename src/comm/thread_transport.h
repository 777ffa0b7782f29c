// SPDX-License-Identifier: Apache-2.0
// Ranks that are threads of one process. A message lies in the sender's memory until the receiver copies it to its own.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "comm/transport.h"

namespace treeattn::comm {

struct ThreadMessage;

// What others leave for a rank, and where it sleeps until they do.
struct Inbox {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::shared_ptr<ThreadMessage>> messages;  // as they came
  std::deque<ReceivedNote> notes;
  bool asleep = false;
  // Goes up with everything that may let the rank go on. Written with the mutex held.
  std::atomic<std::uint64_t> events{0};
  std::atomic<bool> gone{false};
};

// What the ranks share.
struct ThreadHub {
  // nodes [ranks]. spin: every rank has a core to itself, so that spinning for a moment takes it from nobody.
  ThreadHub(std::string_view name, std::vector<int> nodes, bool spin);

  // put(inbox) with the lock of the rank's inbox held, then wakes the rank.
  template <class Put>
  void deliver(int rank, const Put& put) {
    Inbox& inbox = inboxes[static_cast<std::size_t>(rank)];
    bool asleep = false;
    {
      const std::lock_guard lock(inbox.mutex);
      put(inbox);
      inbox.events.fetch_add(1, std::memory_order_release);
      asleep = inbox.asleep;
    }
    if (asleep) inbox.changed.notify_one();
  }
  // Lets the others know that this rank will neither send nor receive any more.
  void leave(int rank);

  const std::string_view name;
  const std::vector<int> nodes;
  const bool spin;
  std::deque<Inbox> inboxes;  // [ranks]
};

std::shared_ptr<Transport> thread_transport(std::shared_ptr<ThreadHub> hub, int rank);

}  // namespace treeattn::comm
