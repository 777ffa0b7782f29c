// SPDX-License-Identifier: Apache-2.0
// A transport in front of another, for tests that change what goes through it.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "comm/thread_transport.h"
#include "comm/transport.h"
#include "treeattn/communicator.h"

namespace treeattn::testing {

class PassingTransport : public comm::Transport {
 public:
  explicit PassingTransport(std::shared_ptr<comm::Transport> inner) : inner_(std::move(inner)) {}

  std::string_view name() const override { return inner_->name(); }
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  const std::vector<int>& nodes() const override { return inner_->nodes(); }
  std::shared_ptr<comm::Operation> send(int to, int tag, std::span<const std::byte> data,
                                        std::shared_ptr<const void> owner) override {
    return inner_->send(to, tag, data, std::move(owner));
  }
  std::shared_ptr<comm::Operation> receive(int from, int tag, std::span<std::byte> data,
                                           std::shared_ptr<const void> owner) override {
    return inner_->receive(from, tag, data, std::move(owner));
  }
  bool test(comm::Operation& operation) override { return inner_->test(operation); }
  void abandon(std::shared_ptr<comm::Operation> operation) override { inner_->abandon(std::move(operation)); }
  void forget(int first, int count) override { inner_->forget(first, count); }
  void send_note(int to, std::vector<std::byte> note) override { inner_->send_note(to, std::move(note)); }
  std::optional<comm::ReceivedNote> next_note() override { return inner_->next_note(); }
  void pause(int idle) override { inner_->pause(idle); }
  bool gone(int rank) const override { return inner_->gone(rank); }
  void mark_lost(const std::vector<int>& ranks) override { inner_->mark_lost(ranks); }

 private:
  const std::shared_ptr<comm::Transport> inner_;
};

// Ranks as threads, each by what wrap(rank, its transport) makes.
template <class Wrap, class Body>
void run_ranks_through(int ranks, const Wrap& wrap, const Body& body) {
  const auto hub =
      std::make_shared<comm::ThreadHub>("threads", std::vector<int>(static_cast<std::size_t>(ranks)), false);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      body(std::make_shared<Communicator>(wrap(rank, comm::thread_transport(hub, rank))));
      hub->leave(rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace treeattn::testing
