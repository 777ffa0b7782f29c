// SPDX-License-Identifier: Apache-2.0
#include "rank.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <simgrid/s4u.hpp>

#include "device.h"
#include "parallel/ring_pass.h"
#include "treeattn/thread_pool.h"

namespace treeattn::tools {
namespace {

using parallel::SharedBuffer;
using parallel::StateShape;

double now() { return simgrid::s4u::Engine::get_clock(); }

// States that a reduction can be checked by: the value of a leaf is its number, and all leaves weigh the same.
SharedBuffer known_states(const plan::NodeSet& nodes, StateShape shape) {
  SharedBuffer states = parallel::make_shared_buffer(nodes.size() * shape.block_floats());
  float* row = states->as<float>();
  for (const plan::TreeNode& node : nodes) {
    const auto leaves = static_cast<float>(std::ldexp(1.0, node.level));
    const float sum = leaves * (static_cast<float>(node.first_leaf()) + (leaves - 1) / 2);
    for (std::size_t r = 0; r < shape.rows; ++r, row += shape.row_floats) {
      row[0] = 0;
      row[1] = leaves;
      std::fill_n(row + 2, shape.row_floats - 2, sum);
    }
  }
  return states;
}

// Every output is the mean of the leaves' numbers.
std::string check_root(const SharedBuffer& root, StateShape shape, int branches) {
  const double expected = (branches - 1) / 2.0;
  for (std::size_t r = 0; r < shape.rows; ++r) {
    const float* row = root->as<float>() + r * shape.row_floats;
    for (std::size_t i = 2; i < shape.row_floats; ++i) {
      const double out = static_cast<double>(row[i]) / static_cast<double>(row[1]);
      if (!(std::fabs(out - expected) <= 1e-3 * std::max(1.0, expected))) {
        return fmt::format("row {} of the result is {}; it should be {}", r, out, expected);
      }
    }
  }
  return {};
}

void tree_step(const Scenario& scenario, Communicator& world, ModelledDevice& device, RankReport& report) {
  static ThreadPool pool(1);  // ranks take turns
  const double start = now();
  device.attend(scenario.kv_bytes(world.rank()));
  report.local_s = now() - start;
  const parallel::ReduceContext context{world, scenario.shares(), pool, scenario.job().canonical};
  const StateShape shape = scenario.state_shape();
  // Everybody's schedule: one for all ranks instead of a view each.
  const SharedBuffer root = parallel::reduce_states(scenario.strategy(), scenario.schedule(), context, shape,
                                                    known_states(scenario.shares().nodes_of(world.rank()), shape));
  report.failure = check_root(root, shape, scenario.job().branches);
}

// K and V of modelled size. A share is one piece: on the simulated link messages that are posted together share the
// bandwidth and arrive together, so cutting it up would change nothing but the number of messages.
class ModelledLoad final : public parallel::RingLoad {
 public:
  ModelledLoad(const Scenario& scenario, Communicator& world, ModelledDevice& device)
      : scenario_(scenario), world_(world), device_(device), place_(world) {
    pieces_.own = 1;
    pieces_.most = 1;
    for (int step = 1; step < world.size(); ++step) pieces_.incoming.push_back(place_.before(step));
  }

  void pass_round() { parallel::pass_round(world_, place_, pieces_, *this); }
  double attending_s() const { return attending_s_; }

  std::vector<Request> send_own(std::size_t) override { return start_send(world_.rank()); }
  std::vector<Request> receive(std::size_t piece, std::size_t) override {
    std::vector<Request> requests;
    const int share = pieces_.incoming[piece];
    if (scenario_.kv_bytes(share) > 0) requests.push_back(world_.receive(place_.left(), memory(share)));
    return requests;
  }
  std::vector<Request> send(std::size_t piece, std::size_t) override { return start_send(pieces_.incoming[piece]); }
  void work_on_own(std::size_t) override { attend(world_.rank()); }
  void work_on(std::size_t piece, std::size_t) override { attend(pieces_.incoming[piece]); }

 private:
  std::span<std::byte> memory(int share) const {
    return modelled_memory(static_cast<std::size_t>(scenario_.kv_bytes(share)),
                           static_cast<std::size_t>(scenario_.largest_share()));
  }

  std::vector<Request> start_send(int share) {
    std::vector<Request> requests;
    if (scenario_.kv_bytes(share) > 0) requests.push_back(world_.send(place_.right(), memory(share)));
    return requests;
  }

  void attend(int share) {
    const double start = now();
    device_.attend(scenario_.kv_bytes(share));
    attending_s_ += now() - start;
  }

  const Scenario& scenario_;
  Communicator& world_;
  ModelledDevice& device_;
  parallel::RingPlace place_;
  parallel::RingPieces pieces_;
  double attending_s_ = 0;
};

// What the ring holds beside its own share: slots for one piece more than a share has, and none that nothing comes to,
// as parallel::RingPieces::slots has it. Of two ranks only one share comes.
std::uint64_t slot_bytes(const Scenario& scenario) {
  const std::uint64_t share = scenario.largest_share();
  return share + (scenario.job().ranks > 2 ? share / parallel::kPiecesPerShare : 0);
}

}  // namespace

RankReport decode_step(const Scenario& scenario, Communicator& world) {
  RankReport report;
  ModelledDevice device(scenario.attention());
  const Shape& shape = scenario.job().shape;
  device.hold(scenario.kv_bytes(world.rank()) + shape.q_bytes() + shape.out_bytes());
  world.reset_traffic();
  const double start = now();
  ModelledDevice::wait(scenario.job().overhead_s);
  if (scenario.strategy() == Strategy::kRing) {
    if (world.size() > 1) device.hold(slot_bytes(scenario));
    ModelledLoad load(scenario, world, device);
    load.pass_round();
    report.local_s = load.attending_s();
  } else {
    tree_step(scenario, world, device, report);
  }
  report.end_s = now() - start;
  report.traffic = world.traffic();
  report.device_bytes = device.held_bytes();
  return report;
}

}  // namespace treeattn::tools
