// SPDX-License-Identifier: Apache-2.0
// Groups, messages between two ranks, and waiting for them.
#include "treeattn/communicator.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/check.h"
#include "base/counting.h"
#include "base/sent.h"
#include "comm/group.h"
#include "comm/survivors.h"
#include "comm/topology.h"
#include "treeattn/error.h"

namespace treeattn {
namespace {

using comm::Call;
using comm::Channel;
using comm::checked;
using comm::name_ranks;

int checked_context(int context) {
  if (context > comm::kMaxContext) {
    throw Error(
        fmt::format("this would be group {} of its ranks; accepted: {} in the life of a communicator (make "
                    "groups once and keep them)",
                    context, comm::kMaxContext));
  }
  return context;
}

}  // namespace

Seconds comm::checked(Seconds deadline) {
  base::require(std::isfinite(deadline.count()) && deadline.count() > 0,
                "deadline = {} s; accepted: a finite number of seconds above 0", deadline.count());
  return std::min(deadline, kLongestDeadline);
}

Request::Request() = default;

Request::~Request() {
  if (operation_ == nullptr) return;
  const auto transport = std::move(operation_->transport);
  transport->abandon(std::move(operation_));
}

Request::Request(Request&& other) noexcept = default;

Request& Request::operator=(Request&& other) noexcept {
  Request taken(std::move(other));
  std::swap(operation_, taken.operation_);
  return *this;
}

Communicator::Impl::Impl(std::shared_ptr<comm::Endpoint> endpoint_, std::shared_ptr<comm::Family> family_,
                         std::vector<int> split_, int context_, Seconds deadline_)
    : endpoint(std::move(endpoint_)),
      family(std::move(family_)),
      split(std::move(split_)),
      members(split.empty() ? family->members() : split),
      context(context_),
      deadline(deadline_) {
  const auto me = std::find(members.begin(), members.end(), transport().rank());
  rank = static_cast<int>(me - members.begin());
  nodes.reserve(members.size());
  for (const int member : members) nodes.push_back(transport().nodes()[static_cast<std::size_t>(member)]);
  nodes = comm::number_nodes(nodes);
  node_count = *std::max_element(nodes.begin(), nodes.end()) + 1;
}

void Communicator::Impl::check_rank(int other, std::string_view name) const {
  base::require(other >= 0 && other < size(), "{} = {}; accepted: 0 to {}", name, other, size() - 1);
}

void Communicator::Impl::check_request(const Request& request) const {
  base::require(!request.pending() || (request.operation_->transport == endpoint->transport() &&
                                       request.operation_->family == family->context()),
                "a request that another communicator made; accepted: one of this group, of one that was split from "
                "it, or of one that it was split from");
}

Call Communicator::Impl::begin(std::string_view name, std::optional<Seconds> own_deadline) {
  const Call call{name, endpoint->begin_call(), checked(own_deadline.value_or(deadline))};
  if (family->over()) throw_lost(name, call.deadline);
  endpoint->look(-1);
  if (!family->quiet()) give_up(call, -1);
  return call;
}

Request Communicator::Impl::send(Channel channel, int to, std::span<const std::byte> data,
                                 std::shared_ptr<const void> owner) {
  const int peer = members[static_cast<std::size_t>(to)];
  Request request;
  request.operation_ = transport().send(peer, comm::tag_of(context, channel), data, std::move(owner));
  request.operation_->transport = endpoint->transport();
  request.operation_->peer = peer;
  request.operation_->family = family->context();
  count_sent(to, data.size());
  return request;
}

void Communicator::Impl::count_sent(int to, std::size_t bytes) {
  if (to == rank) return;  // not on the wire
  const bool remote = nodes[static_cast<std::size_t>(to)] != nodes[static_cast<std::size_t>(rank)];
  traffic.messages += 1;
  traffic.bytes += bytes;
  traffic.remote_messages += remote ? 1 : 0;
  traffic.remote_bytes += remote ? bytes : 0;
}

Request Communicator::Impl::receive(Channel channel, int from, std::span<std::byte> data,
                                    std::shared_ptr<const void> owner) {
  const int peer = members[static_cast<std::size_t>(from)];
  Request request;
  request.operation_ = transport().receive(peer, comm::tag_of(context, channel), data, std::move(owner));
  request.operation_->transport = endpoint->transport();
  request.operation_->peer = peer;
  request.operation_->family = family->context();
  return request;
}

Request Communicator::Impl::checked_send(Channel channel, int to, std::span<const std::byte> data,
                                         std::shared_ptr<const void> owner) {
  check_rank(to, "to");
  base::require_address("data", data);
  if (family->over()) throw_lost("send", deadline);
  return send(channel, to, data, std::move(owner));
}

Request Communicator::Impl::checked_receive(Channel channel, int from, std::span<std::byte> data,
                                            std::shared_ptr<void> owner) {
  check_rank(from, "from");
  base::require_address("data", data);
  if (family->over()) throw_lost("receive", deadline);
  return receive(channel, from, data, std::move(owner));
}

void Communicator::Impl::finish(std::span<Request> requests, const Call& call) {
  const comm::Instant call_at = comm::after(call.start, comm::kCallAt * call.deadline);
  for (int idle = 0;; ++idle) {
    int waits_for = -1;
    bool hopeless = false;
    bool moved = false;
    for (Request& request : requests) {
      if (!request.pending()) continue;
      // In this order: what a rank sent before it went is still to be had.
      const int peer = request.operation_->peer;
      const bool gone = transport().gone(peer);
      if (transport().test(*request.operation_)) {
        request.operation_.reset();
        moved = true;
      } else if (waits_for < 0 || gone) {
        waits_for = peer;
        hopeless = hopeless || gone;
      }
    }
    if (waits_for < 0) return;
    if (moved) idle = 0;
    endpoint->look(waits_for);
    if (!family->quiet() || hopeless || endpoint->now() >= call_at) give_up(call, waits_for);
    transport().pause(idle);
  }
}

void Communicator::Impl::give_up(const Call& call, int waits_for) {
  family->call(comm::after(call.start, comm::kListenUntil * call.deadline), comm::after(call.start, call.deadline));
  for (int idle = 0; !family->over(); ++idle) {
    endpoint->look(waits_for);
    if (!family->over()) transport().pause(idle);
  }
  throw_lost(call.name, call.deadline);
}

void Communicator::Impl::find_lost() {
  lost.clear();
  for (int i = 0; i < size() && family->over(); ++i) {
    if (comm::contains(family->lost(), members[static_cast<std::size_t>(i)])) lost.push_back(i);
  }
}

void Communicator::Impl::throw_lost(std::string_view name, Seconds within) {
  find_lost();
  // A group that has lost none of its own is broken with its family: name the ranks by the family's numbers.
  const bool own = !lost.empty();
  const std::vector<int>& numbered = own ? members : family->members();
  std::vector<int> named, at_first;
  for (std::size_t i = 0; i < numbered.size(); ++i) {
    if (!comm::contains(family->lost(), numbered[i])) continue;
    named.push_back(static_cast<int>(i));
    at_first.push_back(numbered[i]);
  }
  std::string who = fmt::format("{} of {}{}", name_ranks(named), numbered.size(),
                                own ? "" : " in the group that this one was split from");
  // A group that was made by shrinking has numbers that nobody was started with.
  const auto started = static_cast<std::size_t>(transport().size());
  if (family->members().size() < started) who += fmt::format(" ({} of {} at first)", name_ranks(at_first), started);
  const bool known =
      std::all_of(family->lost().begin(), family->lost().end(), [&](int member) { return transport().gone(member); });
  std::string what;
  if (std::find(lost.begin(), lost.end(), rank) != lost.end()) {
    what = fmt::format("{} did not answer the others in time: this rank ({}) has been given up, noticed in {}", who,
                       rank, name);
  } else if (family->slow()) {
    what = fmt::format("{} answered, but too late for a deadline of {:.1f} s in {}", who, within.count(), name);
  } else if (known) {
    what = fmt::format("{} {} gone, noticed in {}", who, named.size() == 1 ? "is" : "are", name);
  } else {
    what = fmt::format("{} did not answer within {:.1f} s in {}", who, within.count(), name);
  }
  throw LostRanks(what, lost, endpoint->lost);
}

std::span<std::byte> Communicator::Impl::scratch(std::size_t bytes) {
  if (buffer == nullptr || buffer->bytes() < bytes) {
    buffer = std::make_shared<base::Buffer>(std::max(bytes, base::Buffer::kLine));
  }
  return {buffer->as<std::byte>(), bytes};
}

Communicator::Communicator(std::shared_ptr<comm::Transport> transport) {
  base::require(transport != nullptr, "transport = null; accepted: a transport");
  auto endpoint = std::make_shared<comm::Endpoint>(std::move(transport));
  auto family = endpoint->make_family(0, base::counting(endpoint->transport()->size()));
  impl_ = std::make_unique<Impl>(std::move(endpoint), std::move(family), std::vector<int>(), 0, kDefaultDeadline);
}

Communicator::Communicator(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Communicator::~Communicator() = default;

int Communicator::rank() const { return impl_->rank; }
int Communicator::size() const { return impl_->size(); }
int Communicator::nodes() const { return impl_->node_count; }

int Communicator::node_of(int rank) const {
  impl_->check_rank(rank, "rank");
  return impl_->nodes[static_cast<std::size_t>(rank)];
}

const std::vector<int>& Communicator::node_of_rank() const { return impl_->nodes; }

std::string_view Communicator::transport() const { return impl_->transport().name(); }
Seconds Communicator::deadline() const { return impl_->deadline; }
void Communicator::set_deadline(Seconds deadline) { impl_->deadline = checked(deadline); }
const Traffic& Communicator::traffic() const { return impl_->traffic; }
void Communicator::reset_traffic(const Traffic& to) { impl_->traffic = to; }
void Communicator::count_step() { impl_->traffic.steps += 1; }
void Communicator::count_sent(int to, std::size_t bytes) {
  impl_->check_rank(to, "to");
  impl_->count_sent(to, bytes);
}

const std::vector<int>& Communicator::lost() const {
  impl_->find_lost();
  return impl_->lost;
}

Request Communicator::send(int to, std::span<const std::byte> data, std::shared_ptr<const void> owner) {
  return impl_->checked_send(Channel::kPointToPoint, to, data, std::move(owner));
}

Request Communicator::receive(int from, std::span<std::byte> data, std::shared_ptr<void> owner) {
  return impl_->checked_receive(Channel::kPointToPoint, from, data, std::move(owner));
}

Request Communicator::send_in_call(int to, std::span<const std::byte> data, std::shared_ptr<const void> owner) {
  return impl_->checked_send(Channel::kInCall, to, data, std::move(owner));
}

Request Communicator::receive_in_call(int from, std::span<std::byte> data, std::shared_ptr<void> owner) {
  return impl_->checked_receive(Channel::kInCall, from, data, std::move(owner));
}

bool Communicator::test(Request& request) {
  impl_->check_request(request);
  if (impl_->family->over()) impl_->throw_lost("test", impl_->deadline);
  if (!request.pending()) return true;
  const comm::Instant now = impl_->endpoint->begin_call();
  const int peer = request.operation_->peer;
  const bool gone = impl_->transport().gone(peer);
  if (impl_->family->quiet() && impl_->transport().test(*request.operation_)) {
    request.operation_.reset();
    return true;
  }
  impl_->endpoint->look(peer);
  if (gone && impl_->family->quiet()) {
    impl_->family->call(comm::after(now, comm::kListenUntil * impl_->deadline), comm::after(now, impl_->deadline));
  }
  if (impl_->family->over()) impl_->throw_lost("test", impl_->deadline);
  return false;
}

void Communicator::wait(Request& request, std::optional<Seconds> deadline) { wait_all({&request, 1}, deadline); }

void Communicator::wait_all(std::span<Request> requests, std::optional<Seconds> deadline) {
  base::require_address("requests", requests);
  for (const Request& request : requests) impl_->check_request(request);
  const Call call = impl_->begin("wait", deadline);
  impl_->finish(requests, call);
}

std::shared_ptr<Communicator> Communicator::split(int color, int key) {
  struct Entry {
    int color;
    int key;
    int next_context;
  };
  const Call call = impl_->begin("split", {});
  const Entry mine{color, key, impl_->endpoint->next_context};
  std::vector<Entry> all(impl_->members.size());
  impl_->allgather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)), call);

  // The groups of one split share no rank, so they can share the context.
  int context = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    base::require_sent(comm::may_be_next_context(all[i].next_context), static_cast<int>(i),
                       "{} as its next group; accepted: 0 to {}", all[i].next_context, comm::kMaxContext + 1);
    context = std::max(context, all[i].next_context);
  }
  impl_->endpoint->next_context = checked_context(context) + 1;
  if (color < 0) return nullptr;
  impl_->family->add_group(context);
  std::vector<int> ranks;
  for (int i = 0; i < size(); ++i) {
    if (all[static_cast<std::size_t>(i)].color == color) ranks.push_back(i);
  }
  std::stable_sort(ranks.begin(), ranks.end(), [&](int a, int b) {
    return all[static_cast<std::size_t>(a)].key < all[static_cast<std::size_t>(b)].key;
  });
  for (int& member : ranks) member = impl_->members[static_cast<std::size_t>(member)];
  return std::shared_ptr<Communicator>(new Communicator(
      std::make_unique<Impl>(impl_->endpoint, impl_->family, std::move(ranks), context, impl_->deadline)));
}

bool Communicator::broken() const { return impl_->family->over(); }

std::shared_ptr<Communicator> Communicator::shrink() {
  if (!broken()) {
    throw Error("shrink() of a group that has lost nobody; accepted: after LostRanks, on every survivor");
  }
  const auto agreement = comm::agree_on_survivors(*impl_->endpoint, *impl_->family, impl_->context, impl_->shrunk,
                                                  impl_->members, impl_->deadline);
  if (!agreement) impl_->throw_lost("shrink", impl_->deadline);
  const int context = checked_context(agreement->context);
  ++impl_->shrunk;
  auto family = impl_->endpoint->make_family(context, agreement->survivors);
  return std::shared_ptr<Communicator>(new Communicator(
      std::make_unique<Impl>(impl_->endpoint, std::move(family), std::vector<int>(), context, impl_->deadline)));
}

}  // namespace treeattn
