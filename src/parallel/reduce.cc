// SPDX-License-Identifier: Apache-2.0
#include "parallel/reduce.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "base/check.h"
#include "merge/rows.h"
#include "parallel/agree.h"

namespace treeattn::parallel {
namespace {

using merge::kEmptyMax;
using plan::Message;
using plan::Payload;

std::span<std::byte> bytes_of(const SharedBuffer& buffer) { return {buffer->as<std::byte>(), buffer->bytes()}; }

std::span<const std::byte> bytes_of(const float* data, std::size_t floats) {
  return std::as_bytes(std::span(data, floats));
}

// Of the i-th part of a message, which may go round the end of the order.
int place_of(const Message& message, int i, const plan::Schedule& schedule) {
  return (message.first + i) % static_cast<int>(schedule.order.size());
}

// One rank's way through a schedule.
class ScheduleRun {
 public:
  ScheduleRun(const ReduceContext& context, const plan::Schedule& schedule, StateShape shape)
      : context_(context), schedule_(schedule), shape_(shape), partial_(shape.rows, shape.row_floats, context.pool) {}

  SharedBuffer run(SharedBuffer own) {
    const int rank = context_.communicator.rank();
    const auto found = std::find(schedule_.order.begin(), schedule_.order.end(), rank);
    const int place = static_cast<int>(found - schedule_.order.begin());
    gathered_[place] = {own, 0};
    bool has_partial = false;
    for (const auto& round : schedule_.rounds) {
      for (const Message& message : round) {
        // A gather keeps the parts as they are; everybody else starts to merge.
        if (message.payload != Payload::kParts) has_partial = true;
      }
    }
    if (has_partial) absorb_part(place);
    for (const auto& round : schedule_.rounds) run_round(round);
    if (result_) return result_;
    if (!has_partial) {
      for (std::size_t p = 0; p < schedule_.order.size(); ++p) absorb_part(static_cast<int>(p));
    }
    return root();
  }

 private:
  struct Part {
    SharedBuffer memory;
    std::size_t offset = 0;
  };
  struct Incoming {
    const Message* message = nullptr;
    SharedBuffer memory;
  };

  std::size_t message_floats(const Message& message) const {
    return plan::states_in(message, schedule_, context_.shares, context_.canonical) * shape_.block_floats();
  }

  int place_of(const Message& message, int i) const { return parallel::place_of(message, i, schedule_); }

  plan::NodeSet part_nodes(int place) const {
    return context_.part(schedule_.order[static_cast<std::size_t>(place)], place);
  }

  // All messages of a round are under way before any is waited for, and nothing is merged until all are done: what is
  // being sent must not change.
  void run_round(const std::vector<Message>& round) {
    Communicator& comm = context_.communicator;
    std::vector<Request> requests;
    std::vector<Incoming> incoming;
    for (const Message& message : round) {
      if (message.to != comm.rank() && message.from != comm.rank()) continue;
      const std::size_t floats = message_floats(message);
      if (floats == 0) continue;
      if (message.to == comm.rank()) {
        SharedBuffer memory = make_shared_buffer(floats);
        requests.push_back(comm.receive_in_call(message.from, bytes_of(memory), memory));
        incoming.push_back({&message, std::move(memory)});
      }
      if (message.from == comm.rank()) {
        const StatesView states = contents(message);
        requests.push_back(comm.send_in_call(message.to, bytes_of(states.data, floats), states.owner));
      }
    }
    comm.count_step();
    comm.wait_all(requests);
    for (const Incoming& in : incoming) take(*in.message, in.memory);
  }

  // What a message says, sent from where it lies: only parts from several messages are put together first.
  StatesView contents(const Message& message) {
    if (message.payload == Payload::kPartial) return partial_.packed();
    if (message.payload == Payload::kResult) {
      if (!result_) result_ = root();
      return {result_->as<float>(), result_};
    }
    if (message.count == 1) return part_at(place_of(message, 0));
    const SharedBuffer all = make_shared_buffer(message_floats(message));
    float* to = all->as<float>();
    for (int i = 0; i < message.count; ++i) {
      const int place = place_of(message, i);
      const std::size_t floats = part_nodes(place).size() * shape_.block_floats();
      if (floats > 0) to = std::copy_n(part_at(place).data, floats, to);
    }
    return {all->as<float>(), all};
  }

  StatesView part_at(int place) const {
    const Part& part = gathered_.at(place);
    return {part.memory->as<float>() + part.offset, part.memory};
  }

  void take(const Message& message, const SharedBuffer& memory) {
    if (message.payload == Payload::kResult) {
      result_ = memory;
      return;
    }
    if (message.payload == Payload::kParts) {
      std::size_t offset = 0;
      for (int i = 0; i < message.count; ++i) {
        const int place = place_of(message, i);
        gathered_[place] = {memory, offset};
        offset += part_nodes(place).size() * shape_.block_floats();
      }
      return;
    }
    partial_.add(context_.merged_parts(message, schedule_), memory);
    if (!context_.canonical) partial_.merge_all();
  }

  void absorb_part(int place) {
    const plan::NodeSet nodes = part_nodes(place);
    if (nodes.empty()) return;
    const auto part = gathered_.at(place);
    partial_.add(nodes, part.memory, part.offset);
    if (!context_.canonical) partial_.merge_all();
  }

  // The one block that is left: the root.
  SharedBuffer root() {
    if (partial_.nodes().size() != 1) throw Error("internal: a reduction ended with more than its root");
    const StatesView block = partial_.packed();
    if (block.data == block.owner->as<float>()) return block.owner;
    SharedBuffer out = make_shared_buffer(shape_.block_floats());
    partial_.pack(out->as<float>());
    return out;
  }

  const ReduceContext& context_;
  const plan::Schedule& schedule_;
  StateShape shape_;
  NodeStates partial_;
  std::map<int, Part> gathered_;  // by place
  SharedBuffer result_;
};

// In the free order a rank brings one state: all it carries, merged.
SharedBuffer merge_own(const ReduceContext& context, StateShape shape, SharedBuffer own) {
  const plan::NodeSet& nodes = context.shares.nodes_of(context.communicator.rank());
  if (nodes.size() == 1) return own;
  NodeStates states(shape.rows, shape.row_floats, context.pool);
  if (!nodes.empty()) states.add(nodes, own);
  states.merge_all();
  SharedBuffer out = make_shared_buffer(shape.block_floats());
  if (nodes.empty()) {
    merge::clear_rows(out->as<float>(), shape.rows, shape.row_floats);
  } else {
    states.pack(out->as<float>());
  }
  return out;
}

}  // namespace

plan::NodeSet ReduceContext::part(int rank, int place) const {
  const plan::NodeSet& nodes = shares.nodes_of(rank);
  if (canonical || nodes.empty()) return nodes;
  return {{0, place}};
}

plan::NodeSet ReduceContext::merged_parts(const Message& message, const plan::Schedule& schedule) const {
  plan::NodeSet nodes;
  for (int i = 0; i < message.count; ++i) {
    const int place = place_of(message, i, schedule);
    nodes = plan::unite(nodes, part(schedule.order[static_cast<std::size_t>(place)], place));
  }
  if (!canonical) nodes.resize(1);
  return nodes;
}

SharedBuffer reduce_by_schedule(const ReduceContext& context, const plan::Schedule& schedule, StateShape shape,
                                SharedBuffer own) {
  if (!context.canonical) own = merge_own(context, shape, std::move(own));
  return ScheduleRun(context, schedule, shape).run(std::move(own));
}

SharedBuffer reduce_in_two_phases(const ReduceContext& context, StateShape shape, SharedBuffer own) {
  Communicator& comm = context.communicator;
  own = merge_own(context, shape, std::move(own));
  const std::size_t rest = shape.row_floats - 1;
  std::vector<float> top(shape.rows), sums(shape.rows * rest);
  for (std::size_t r = 0; r < shape.rows; ++r) top[r] = own->as<float>()[r * shape.row_floats];
  combine_over_ranks(comm, std::span(top), larger<float>);
  for (std::size_t r = 0; r < shape.rows; ++r) {
    const float* row = own->as<float>() + r * shape.row_floats;
    // An empty state is selected away: its sums may hold anything.
    const bool empty = row[0] == kEmptyMax;
    const float weight = empty ? 0.0f : merge::state_weight(row[0], top[r]);
    for (std::size_t i = 0; i < rest; ++i) sums[r * rest + i] = empty ? 0.0f : row[1 + i] * weight;
  }
  combine_over_ranks(comm, std::span(sums), std::plus<float>());
  for (std::size_t r = 0; r < shape.rows; ++r) {
    float* row = own->as<float>() + r * shape.row_floats;
    row[0] = top[r];
    std::copy_n(sums.data() + r * rest, rest, row + 1);
  }
  return own;
}

// As printed, flash attention's (o, lse) and all, only in base 2: o is normalised, lse one float. Where |lse| is large
// that float is coarse; docs/exactness.md says what it costs.
SharedBuffer reduce_as_in_paper(const ReduceContext& context, StateShape shape, SharedBuffer own) {
  Communicator& comm = context.communicator;
  own = merge_own(context, shape, std::move(own));
  const std::size_t v_dim = shape.row_floats - 2;
  std::vector<float> lse(shape.rows), top(shape.rows), numerator(shape.rows * v_dim), denominator(shape.rows);
  for (std::size_t r = 0; r < shape.rows; ++r) {
    const float* row = own->as<float>() + r * shape.row_floats;
    float* o = numerator.data() + r * v_dim;
    for (std::size_t i = 0; i < v_dim; ++i) o[i] = merge::finished(row[0], row[1], row[2 + i]);
    lse[r] = row[0] == kEmptyMax ? kEmptyMax : row[0] + std::log2(row[1]);
  }
  top = lse;
  combine_over_ranks(comm, std::span(top), larger<float>);
  for (std::size_t r = 0; r < shape.rows; ++r) {
    denominator[r] = lse[r] == kEmptyMax ? 0.0f : merge::state_weight(lse[r], top[r]);
    for (std::size_t i = 0; i < v_dim; ++i) numerator[r * v_dim + i] *= denominator[r];
  }
  combine_over_ranks(comm, std::span(numerator), std::plus<float>());
  combine_over_ranks(comm, std::span(denominator), std::plus<float>());
  for (std::size_t r = 0; r < shape.rows; ++r) {
    float* row = own->as<float>() + r * shape.row_floats;
    row[0] = top[r];
    row[1] = denominator[r];
    std::copy_n(numerator.data() + r * v_dim, v_dim, row + 2);
  }
  return own;
}

SharedBuffer reduce_states(Strategy strategy, const plan::Schedule& schedule, const ReduceContext& context,
                           StateShape shape, SharedBuffer own) {
  switch (strategy) {
    case Strategy::kPaper:
      return reduce_as_in_paper(context, shape, std::move(own));
    case Strategy::kTwoPhase:
      return reduce_in_two_phases(context, shape, std::move(own));
    default:
      return reduce_by_schedule(context, schedule, shape, std::move(own));
  }
}

SharedBuffer reduce_scatter(const ReduceContext& context, std::span<const std::size_t> rows_of_rank, StateShape shape,
                            SharedBuffer own) {
  Communicator& comm = context.communicator;
  const int rank = comm.rank();
  const auto rows = [&](int r) {
    return rows_of_rank[static_cast<std::size_t>(r) + 1] - rows_of_rank[static_cast<std::size_t>(r)];
  };
  const auto nodes = [&](int r) { return context.part(r, r); };
  if (!context.canonical) own = merge_own(context, shape, std::move(own));
  // The rows of one rank, block after block.
  const auto slice = [&](int r) {
    const std::size_t floats = rows(r) * shape.row_floats;
    SharedBuffer out = make_shared_buffer(nodes(rank).size() * floats);
    for (std::size_t n = 0; n < nodes(rank).size(); ++n) {
      const float* block = own->as<float>() + n * shape.block_floats();
      std::copy_n(block + rows_of_rank[static_cast<std::size_t>(r)] * shape.row_floats, floats,
                  out->as<float>() + n * floats);
    }
    return out;
  };
  std::vector<Request> requests;
  std::vector<SharedBuffer> part(static_cast<std::size_t>(comm.size()));
  for (int r = 0; r < comm.size(); ++r) {
    const std::size_t floats = nodes(r).size() * rows(rank) * shape.row_floats;
    if (floats == 0 || r == rank) continue;
    part[static_cast<std::size_t>(r)] = make_shared_buffer(floats);
    requests.push_back(
        comm.receive_in_call(r, bytes_of(part[static_cast<std::size_t>(r)]), part[static_cast<std::size_t>(r)]));
  }
  for (int i = 1; i < comm.size(); ++i) {
    const int to = (rank + i) % comm.size();  // not all to the same rank at once
    if (rows(to) == 0 || nodes(rank).empty()) continue;
    SharedBuffer memory = slice(to);
    requests.push_back(comm.send_in_call(to, bytes_of(memory), memory));
  }
  comm.count_step();
  comm.wait_all(requests);
  part[static_cast<std::size_t>(rank)] = slice(rank);
  NodeStates states(rows(rank), shape.row_floats, context.pool);
  if (rows(rank) > 0) {
    for (int r = 0; r < comm.size(); ++r) {
      if (!nodes(r).empty()) states.add(nodes(r), part[static_cast<std::size_t>(r)]);
    }
    if (!context.canonical) states.merge_all();
  }
  SharedBuffer out = make_shared_buffer(rows(rank) * shape.row_floats);
  states.pack(out->as<float>());
  return out;
}

}  // namespace treeattn::parallel
