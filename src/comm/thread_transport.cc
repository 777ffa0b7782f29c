// SPDX-License-Identifier: Apache-2.0
#include "comm/thread_transport.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <set>
#include <thread>
#include <utility>

#include "base/spin.h"
#include "comm/far_memory.h"
#include "treeattn/error.h"

namespace treeattn::comm {

// Shared by the sender and the inbox it lies in. It refers to no transport: inboxes outlive those.
struct ThreadMessage {
  // A small message is copied when it is sent (kDone from the start, for the sender). A large one, or one in memory of
  // a GPU, stays where it is, and its send is under way until the receiver has it. One that is given up before that
  // keeps its place, so that nothing sent later is taken for it: a receive that meets it is never done.
  enum State : int { kWaiting, kCopying, kDone, kGivenUp };

  int from = 0;
  int tag = 0;
  std::span<const std::byte> data;
  std::vector<std::byte> copy;
  std::atomic<int> state{kWaiting};
};

namespace {

constexpr std::size_t kCopyUpTo = std::size_t{64} << 10;
// Who waits on and on, as for somebody to type, only sleeps.
constexpr int kSpins = 3;
// So that a waiting call looks at the clock now and then.
constexpr std::chrono::milliseconds kNap{5};
constexpr std::uint64_t kNever = ~std::uint64_t{0};

struct ThreadSend final : Operation {
  int to = 0;
  std::shared_ptr<ThreadMessage> message;
};

struct ThreadReceive final : Operation {
  int from = 0;
  int tag = 0;
  std::span<std::byte> data;
  bool done = false;
  std::size_t came = 0;  // bytes of the message
  std::exception_ptr failure;
};

class ThreadTransport final : public Transport {
 public:
  ThreadTransport(std::shared_ptr<ThreadHub> hub, int rank)
      : hub_(std::move(hub)), rank_(rank), inbox_(hub_->inboxes[static_cast<std::size_t>(rank)]) {}

  std::string_view name() const override { return hub_->name; }
  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(hub_->nodes.size()); }
  const std::vector<int>& nodes() const override { return hub_->nodes; }

  std::shared_ptr<Operation> send(int to, int tag, std::span<const std::byte> data,
                                  std::shared_ptr<const void> owner) override {
    auto message = std::make_shared<ThreadMessage>();
    message->from = rank_;
    message->tag = tag;
    message->data = data;
    if (data.size() <= kCopyUpTo && copier_of(data.data()) == nullptr) {
      message->copy.assign(data.begin(), data.end());
      message->data = message->copy;
      message->state.store(ThreadMessage::kDone, std::memory_order_relaxed);
    }
    auto operation = std::make_shared<ThreadSend>();
    operation->owner = std::move(owner);
    operation->message = message;
    operation->to = to;
    hub_->deliver(to, [&](Inbox& inbox) { inbox.messages.push_back(std::move(message)); });
    return operation;
  }

  std::shared_ptr<Operation> receive(int from, int tag, std::span<std::byte> data,
                                     std::shared_ptr<const void> owner) override {
    auto operation = std::make_shared<ThreadReceive>();
    operation->owner = std::move(owner);
    operation->from = from;
    operation->tag = tag;
    operation->data = data;
    posted_.push_back(operation.get());
    receives_looked_at_ = kNever;
    return operation;
  }

  bool test(Operation& operation) override {
    if (is_done(operation)) return true;
    take_what_came();
    return is_done(operation);
  }

  void abandon(std::shared_ptr<Operation> operation) override {
    if (const auto* sending = dynamic_cast<ThreadSend*>(operation.get())) {
      withdraw(*sending);
    } else {
      std::erase(posted_, static_cast<ThreadReceive*>(operation.get()));
    }
  }

  void forget(int first, int count) override {
    for (int tag = first; tag < first + count; ++tag) forgotten_.insert(tag);
    receives_looked_at_ = kNever;
  }

  void send_note(int to, std::vector<std::byte> note) override {
    hub_->deliver(to, [&](Inbox& inbox) { inbox.notes.push_back({rank_, std::move(note)}); });
  }

  std::optional<ReceivedNote> next_note() override {
    const std::uint64_t events = inbox_.events.load(std::memory_order_acquire);
    if (events == notes_looked_at_) return {};
    const std::lock_guard lock(inbox_.mutex);
    if (inbox_.notes.empty()) {
      notes_looked_at_ = events;
      return {};
    }
    ReceivedNote note = std::move(inbox_.notes.front());
    inbox_.notes.pop_front();
    return note;
  }

  // Returns at once if anything has happened since it returned last, so nothing slips through between a test and this.
  void pause(int idle) override {
    const auto changed = [&] { return inbox_.events.load(std::memory_order_acquire) != seen_; };
    if (!changed() && !(hub_->spin && idle < kSpins && base::spin_until(changed))) {
      std::unique_lock lock(inbox_.mutex);
      inbox_.asleep = true;
      inbox_.changed.wait_for(lock, kNap, changed);
      inbox_.asleep = false;
    }
    seen_ = inbox_.events.load(std::memory_order_acquire);
  }

  bool gone(int rank) const override {
    return hub_->inboxes[static_cast<std::size_t>(rank)].gone.load(std::memory_order_acquire);
  }

  void mark_lost(const std::vector<int>&) override {}

 private:
  using Match = std::pair<std::shared_ptr<ThreadMessage>, ThreadReceive*>;

  static bool is_done(const Operation& operation) {
    if (const auto* sending = dynamic_cast<const ThreadSend*>(&operation)) {
      return sending->message->state.load(std::memory_order_acquire) == ThreadMessage::kDone;
    }
    const auto& receiving = static_cast<const ThreadReceive&>(operation);
    if (receiving.done) check(receiving);
    return receiving.done;
  }

  // For every receive, not only the one that is asked about: ranks that wait for their sends in a ring would otherwise
  // wait for each other.
  void take_what_came() {
    const std::uint64_t events = inbox_.events.load(std::memory_order_acquire);
    if (events == receives_looked_at_) return;
    std::vector<Match> matched;
    {
      const std::lock_guard lock(inbox_.mutex);
      std::erase_if(inbox_.messages, [&](std::shared_ptr<ThreadMessage>& message) {
        if (forgotten_.contains(message->tag)) return true;
        // Of several receives the first that was asked for gets it.
        const auto found = std::find_if(posted_.begin(), posted_.end(), [&](const ThreadReceive* receiving) {
          return receiving->from == message->from && receiving->tag == message->tag;
        });
        if (found == posted_.end()) return false;
        int state = ThreadMessage::kWaiting;
        message->state.compare_exchange_strong(state, ThreadMessage::kCopying, std::memory_order_relaxed);
        if (state != ThreadMessage::kGivenUp) matched.emplace_back(std::move(message), *found);
        posted_.erase(found);
        return true;
      });
    }
    receives_looked_at_ = events;
    // Without the lock: a long copy must not keep others from sending.
    copy(matched);
  }

  // Copies in memory of GPUs are all started before any is waited for.
  void copy(std::span<const Match> matched) {
    const FarMemory::Copier* far = nullptr;
    const auto guarded = [](ThreadReceive& receiving, const auto& work) {
      try {
        work();
      } catch (...) {
        receiving.failure = std::current_exception();
      }
    };
    for (const auto& [message, receiving] : matched) {
      const std::size_t bytes = message->data.size();
      receiving->came = bytes;
      if (bytes != receiving->data.size() || bytes == 0) continue;
      const void* from = message->data.data();
      void* to = receiving->data.data();
      const FarMemory::Copier* copier = copier_of(from);
      if (copier == nullptr) copier = copier_of(to);
      if (copier == nullptr) {
        std::memcpy(to, from, bytes);
      } else {
        far = copier;
        guarded(*receiving, [&] { copier->start(to, from, bytes); });
      }
    }
    for (const auto& [message, receiving] : matched) {
      if (far != nullptr) guarded(*receiving, far->finish);
      receiving->done = true;
      if (message->state.exchange(ThreadMessage::kDone, std::memory_order_acq_rel) == ThreadMessage::kCopying) {
        hub_->deliver(message->from, [](Inbox&) {});
      }
    }
  }

  // For the one who asked for that message, and nobody else.
  static void check(const ThreadReceive& receiving) {
    if (receiving.failure) std::rethrow_exception(receiving.failure);
    if (receiving.came == receiving.data.size()) return;
    throw Error(
        fmt::format("receive of {} bytes met a message of {} bytes from transport rank {}; accepted: the "
                    "size that was sent",
                    receiving.data.size(), receiving.came, receiving.from));
  }

  void withdraw(const ThreadSend& sending) {
    if (sending.message->state.load(std::memory_order_acquire) == ThreadMessage::kDone) return;
    {
      Inbox& inbox = hub_->inboxes[static_cast<std::size_t>(sending.to)];
      const std::lock_guard lock(inbox.mutex);
      int state = ThreadMessage::kWaiting;
      if (sending.message->state.compare_exchange_strong(state, ThreadMessage::kGivenUp)) return;
    }
    // The receiver has it already: its copy takes a moment, and the memory may go when this returns.
    while (sending.message->state.load(std::memory_order_acquire) == ThreadMessage::kCopying) std::this_thread::yield();
  }

  const std::shared_ptr<ThreadHub> hub_;
  const int rank_;
  Inbox& inbox_;
  std::vector<ThreadReceive*> posted_;  // receives not done, as they were asked for; taken out when given up
  std::set<int> forgotten_;             // tags
  std::uint64_t seen_ = 0;
  // The inbox's events when there was nothing (more) to take.
  std::uint64_t receives_looked_at_ = kNever;
  std::uint64_t notes_looked_at_ = kNever;
};

}  // namespace

ThreadHub::ThreadHub(std::string_view name_of_transport, std::vector<int> node_of_rank, bool spin_first)
    : name(name_of_transport), nodes(std::move(node_of_rank)), spin(spin_first), inboxes(nodes.size()) {}

void ThreadHub::leave(int rank) {
  inboxes[static_cast<std::size_t>(rank)].gone.store(true, std::memory_order_release);
  for (int other = 0; other < static_cast<int>(inboxes.size()); ++other) deliver(other, [](Inbox&) {});
}

std::shared_ptr<Transport> thread_transport(std::shared_ptr<ThreadHub> hub, int rank) {
  return std::make_shared<ThreadTransport>(std::move(hub), rank);
}

}  // namespace treeattn::comm
