// SPDX-License-Identifier: Apache-2.0
// The collectives, as messages between two ranks.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "base/round_up.h"
#include "comm/group.h"

namespace treeattn {
namespace {

using comm::Call;
using comm::Channel;

// The binomial tree over places 0 to size - 1: the parent of a place is itself without its lowest bit, so a place and
// all below it are neighbours. Children from the nearest, which has the smallest subtree, to the farthest.
std::vector<int> children_of(int place, int size) {
  std::vector<int> out;
  for (int bit = 1; place + bit < size && (place & bit) == 0; bit *= 2) out.push_back(place + bit);
  return out;
}

int parent_of(int place) { return place & (place - 1); }

// ceil(log2 ranks)
std::uint64_t rounds_of(int ranks) {
  return static_cast<std::uint64_t>(std::bit_width(static_cast<unsigned>(ranks - 1)));
}

void copy(std::span<std::byte> to, std::span<const std::byte> from) {
  if (!from.empty()) std::memcpy(to.data(), from.data(), from.size());
}

}  // namespace

void Communicator::allreduce(std::span<std::byte> data, std::size_t element_bytes, const ReduceFn& reduce,
                             std::optional<Seconds> deadline) {
  base::require(element_bytes > 0 && data.size() % element_bytes == 0,
                "allreduce of {} bytes in elements of {}; accepted: a whole number of elements", data.size(),
                element_bytes);
  base::require_address("data", data);
  base::require(reduce != nullptr, "reduce is empty; accepted: a function");
  const Call call = impl_->begin("allreduce", deadline);
  if (size() == 1) return;
  const std::size_t stride = base::round_up(data.size(), base::Buffer::kLine);
  const auto memory = impl_->scratch(2 * stride);
  const auto mine = memory.subspan(0, data.size());
  const auto theirs = memory.subspan(stride, data.size());
  const std::vector<int> children = children_of(rank(), size());
  copy(mine, data);

  for (const int child : children) {
    Request request = impl_->receive(Channel::kCollective, child, theirs, impl_->buffer);
    impl_->finish({&request, 1}, call);
    if (!data.empty()) reduce(mine.data(), theirs.data(), data.size() / element_bytes);
  }
  auto result = mine;
  if (rank() != 0) {
    std::array<Request, 2> requests;
    requests[0] = impl_->send(Channel::kCollective, parent_of(rank()), mine, impl_->buffer);
    requests[1] = impl_->receive(Channel::kCollective, parent_of(rank()), theirs, impl_->buffer);
    impl_->finish(requests, call);
    result = theirs;
  }
  std::vector<Request> down;
  for (auto child = children.rbegin(); child != children.rend(); ++child) {
    down.push_back(impl_->send(Channel::kCollective, *child, result, impl_->buffer));
  }
  impl_->finish(down, call);
  copy(data, result);
  impl_->traffic.steps += 2 * rounds_of(size());
}

void Communicator::Impl::allgather(std::span<const std::byte> mine, std::span<std::byte> all, const Call& call) {
  // Block i is that of rank + i, going round. After the round of `have` blocks there are twice as many.
  const auto blocks = scratch(all.size());
  copy(blocks, mine);
  for (int have = 1; have < size(); have *= 2) {
    const std::size_t bytes = static_cast<std::size_t>(std::min(have, size() - have)) * mine.size();
    std::array<Request, 2> requests;
    requests[0] = send(Channel::kCollective, (rank - have + size()) % size(), blocks.subspan(0, bytes), buffer);
    requests[1] = receive(Channel::kCollective, (rank + have) % size(),
                          blocks.subspan(static_cast<std::size_t>(have) * mine.size(), bytes), buffer);
    finish(requests, call);
    traffic.steps += 1;
  }
  const std::size_t ahead = static_cast<std::size_t>(rank) * mine.size();
  copy(all.subspan(ahead), blocks.subspan(0, all.size() - ahead));
  copy(all, blocks.subspan(all.size() - ahead));
}

void Communicator::allgather(std::span<const std::byte> mine, std::span<std::byte> all,
                             std::optional<Seconds> deadline) {
  // By division, because the product may overflow where the caller's sizes are wrong.
  const std::size_t ranks = impl_->members.size();
  base::require(all.size() % ranks == 0 && all.size() / ranks == mine.size(),
                "allgather of {} bytes from each of {} ranks into {}; accepted: {} * {}", mine.size(), ranks,
                all.size(), ranks, mine.size());
  base::require_address("mine", mine);
  base::require_address("all", all);
  impl_->allgather(mine, all, impl_->begin("allgather", deadline));
}

void Communicator::broadcast(std::span<std::byte> data, int root, std::optional<Seconds> deadline) {
  impl_->check_rank(root, "root");
  base::require_address("data", data);
  const Call call = impl_->begin("broadcast", deadline);
  if (size() == 1) return;
  const auto memory = impl_->scratch(data.size());
  const auto at = [&](int place) { return (place + root) % size(); };
  const int place = (rank() - root + size()) % size();
  if (place == 0) {
    copy(memory, data);
  } else {
    Request request = impl_->receive(Channel::kCollective, at(parent_of(place)), memory, impl_->buffer);
    impl_->finish({&request, 1}, call);
  }
  const std::vector<int> children = children_of(place, size());
  std::vector<Request> down;
  for (auto child = children.rbegin(); child != children.rend(); ++child) {
    down.push_back(impl_->send(Channel::kCollective, at(*child), memory, impl_->buffer));
  }
  impl_->finish(down, call);
  if (place != 0) copy(data, memory);
  impl_->traffic.steps += rounds_of(size());
}

void Communicator::barrier(std::optional<Seconds> deadline) {
  // Who has everybody's nothing knows that everybody has come.
  impl_->allgather({}, {}, impl_->begin("barrier", deadline));
}

}  // namespace treeattn
