// SPDX-License-Identifier: Apache-2.0
#include "plan/schedule.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <numeric>
#include <utility>

#include "base/check.h"

namespace treeattn::plan {
namespace {

int size_of(std::span<const int> ranks) { return static_cast<int>(ranks.size()); }

int rank_at(const Schedule& schedule, int place) { return schedule.order[static_cast<std::size_t>(place)]; }

// first, first + 1, ..., last.
std::vector<int> counting(int first, int last) {
  std::vector<int> numbers(static_cast<std::size_t>(last - first + 1));
  std::iota(numbers.begin(), numbers.end(), first);
  return numbers;
}

// Reduces groups of places, [begins[g], begins[g + 1]) each and already reduced to its first place, to the first place
// of the first group. The first of its rounds is rounds[round], so that several trees can go side by side.
void add_tree(Schedule& schedule, std::span<const int> begins, std::size_t round) {
  const std::size_t groups = begins.size() - 1;
  for (std::size_t step = 1; step < groups; step *= 2, ++round) {
    if (schedule.rounds.size() <= round) schedule.rounds.resize(round + 1);
    for (std::size_t group = 0; group + step < groups; group += 2 * step) {
      const int first = begins[group + step];
      const int last = begins[std::min(group + 2 * step, groups)];
      schedule.rounds[round].push_back({.from = rank_at(schedule, first),
                                        .to = rank_at(schedule, begins[group]),
                                        .payload = Payload::kPartial,
                                        .first = first,
                                        .count = last - first});
    }
  }
}

// The result takes the way of the partial results, in reverse.
std::vector<Message> way_back(std::vector<Message> round, int places) {
  for (Message& message : round) {
    message = {.from = message.to, .to = message.from, .payload = Payload::kResult, .first = 0, .count = places};
  }
  return round;
}

void add_way_back(Schedule& schedule) {
  for (std::size_t up = schedule.rounds.size(); up-- > 0;) {
    schedule.rounds.push_back(way_back(schedule.rounds[up], size_of(schedule.order)));
  }
}

template <class Visit>
void for_each_set(const Message& message, const Schedule& schedule, const Shares& shares, const Visit& visit) {
  const int places = size_of(schedule.order);
  for (int i = 0, place = message.first; i < message.count; ++i) {
    visit(shares.nodes_of(rank_at(schedule, place)));
    if (++place == places) place = 0;
  }
}

std::size_t partial_states(const Message& message, const Schedule& schedule, const Shares& shares, bool canonical) {
  std::vector<TreeNode> nodes;
  for_each_set(message, schedule, shares,
               [&](const NodeSet& set) { nodes.insert(nodes.end(), set.begin(), set.end()); });
  return canonical ? cover(std::move(nodes)).size() : std::min<std::size_t>(nodes.size(), 1);
}

std::size_t part_states(const Message& message, const Schedule& schedule, const Shares& shares, bool canonical) {
  std::size_t states = 0;
  for_each_set(message, schedule, shares,
               [&](const NodeSet& set) { states += canonical ? set.size() : std::min<std::size_t>(set.size(), 1); });
  return states;
}

}  // namespace

Schedule Schedule::seen_by(int rank) const {
  Schedule mine{order, {}};
  for (const std::vector<Message>& round : rounds) {
    std::vector<Message>& kept = mine.rounds.emplace_back();
    std::copy_if(round.begin(), round.end(), std::back_inserter(kept),
                 [rank](const Message& message) { return message.from == rank || message.to == rank; });
  }
  return mine;
}

Schedule tree_schedule(std::span<const int> order) {
  Schedule schedule{{order.begin(), order.end()}, {}};
  add_tree(schedule, counting(0, size_of(order)), 0);
  add_way_back(schedule);
  return schedule;
}

Schedule butterfly_schedule(std::span<const int> order) {
  Schedule schedule{{order.begin(), order.end()}, {}};
  const int places = size_of(order);
  const int groups = static_cast<int>(std::bit_floor(order.size()));
  const int pairs = places - groups;  // the first groups are two places, the others one
  const auto begin = [pairs](int group) { return group + std::min(group, pairs); };
  const auto message = [&](int from, int to, int first, int last) {
    return Message{rank_at(schedule, from), rank_at(schedule, to), Payload::kPartial, first, last - first};
  };
  std::vector<Message> fold;
  for (int group = 0; group < pairs; ++group) {
    const int even = begin(group);
    fold.push_back(message(even + 1, even, even + 1, even + 2));
  }
  if (pairs > 0) schedule.rounds.push_back(fold);
  for (int step = 1; step < groups; step *= 2) {
    std::vector<Message>& round = schedule.rounds.emplace_back();
    for (int group = 0; group < groups; ++group) {
      const int first = group & ~(step - 1);
      round.push_back(message(begin(group), begin(group ^ step), begin(first), begin(first + step)));
    }
  }
  if (pairs > 0) schedule.rounds.push_back(way_back(std::move(fold), places));
  return schedule;
}

Schedule gather_schedule(std::span<const int> order) {
  Schedule schedule{{order.begin(), order.end()}, {}};
  const int places = size_of(order);
  // Before a round of distance d, place i has the parts of [i, i + d).
  for (int distance = 1; distance < places; distance *= 2) {
    std::vector<Message>& round = schedule.rounds.emplace_back();
    for (int place = 0; place < places; ++place) {
      const int from = (place + distance) % places;
      round.push_back({.from = rank_at(schedule, from),
                       .to = rank_at(schedule, place),
                       .payload = Payload::kParts,
                       .first = from,
                       .count = std::min(distance, places - distance)});
    }
  }
  return schedule;
}

Schedule two_level_schedule(std::span<const int> node_of_rank) {
  Schedule schedule{ranks_by_node(node_of_rank), {}};
  const int places = size_of(schedule.order);
  const auto node_at = [&](int place) { return node_of_rank[static_cast<std::size_t>(rank_at(schedule, place))]; };
  std::vector<int> begins;  // of the nodes
  for (int place = 0; place < places; ++place) {
    if (place == 0 || node_at(place) != node_at(place - 1)) begins.push_back(place);
  }
  begins.push_back(places);
  for (std::size_t node = 0; node + 1 < begins.size(); ++node) {
    add_tree(schedule, counting(begins[node], begins[node + 1]), 0);
  }
  add_tree(schedule, begins, schedule.rounds.size());
  add_way_back(schedule);
  return schedule;
}

Schedule make_schedule(Strategy strategy, std::span<const int> node_of_rank) {
  switch (strategy) {
    case Strategy::kMerge:
      return tree_schedule(ranks_by_node(node_of_rank));
    case Strategy::kButterfly:
      return butterfly_schedule(ranks_by_node(node_of_rank));
    case Strategy::kGather:
      return gather_schedule(ranks_by_node(node_of_rank));
    case Strategy::kTwoLevel:
      return two_level_schedule(node_of_rank);
    default:
      base::throw_invalid("strategy {} has no schedule; accepted: merge, butterfly, gather, two_level",
                          strategy_name(strategy));
  }
}

std::size_t states_in(const Message& message, const Schedule& schedule, const Shares& shares, bool canonical) {
  switch (message.payload) {
    case Payload::kPartial:
      return partial_states(message, schedule, shares, canonical);
    case Payload::kParts:
      return part_states(message, schedule, shares, canonical);
    case Payload::kResult:
      return 1;
  }
  base::throw_invalid("payload = {}; accepted: 0 to 2", static_cast<int>(message.payload));
}

std::vector<std::vector<std::size_t>> states_of(const Schedule& schedule, const Shares& shares, bool canonical) {
  std::vector<std::vector<std::size_t>> states;
  for (const std::vector<Message>& round : schedule.rounds) {
    std::vector<std::size_t>& counts = states.emplace_back();
    for (std::size_t i = 0; i < round.size(); ++i) {
      // In a butterfly all members of a group send the same, and follow each other: counted one by one, its last rounds
      // would cost the square of the ranks.
      const bool again = i > 0 && round[i].payload == round[i - 1].payload && round[i].first == round[i - 1].first &&
                         round[i].count == round[i - 1].count;
      counts.push_back(again ? counts.back() : states_in(round[i], schedule, shares, canonical));
    }
  }
  return states;
}

}  // namespace treeattn::plan
