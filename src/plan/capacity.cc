// SPDX-License-Identifier: Apache-2.0
#include "plan/capacity.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/bisect.h"
#include "base/check.h"
#include "base/round_up.h"
#include "plan/tree_order.h"

namespace treeattn::plan {
namespace {

using base::require;

constexpr std::int64_t kMostContext = std::int64_t{1} << 40;
constexpr double kMostBytes = 0x1p60;

std::uint64_t wide(std::int64_t value) { return static_cast<std::uint64_t>(value); }

void check(const CapacityRequest& request, int devices) {
  const ModelSize& m = request.model;
  for (const std::int64_t value : {m.layers, m.hidden, m.heads, m.kv_heads, m.head_dim, m.feed_forward, m.vocab}) {
    require(value > 0, "the model has a size of {}; accepted: 1 or more", value);
  }
  require(m.kv_row_bytes > 0, "kv_row_bytes = {}; accepted: 1 or more", m.kv_row_bytes);
  require(request.context > 0 && request.context <= kMostContext, "context = {}; accepted: 1 to {}", request.context,
          kMostContext);
  require(request.batch > 0, "batch = {}; accepted: 1 or more", request.batch);
  require(request.usable > 0 && request.usable <= 1, "usable = {}; accepted: more than 0, up to 1", request.usable);
  require(devices > 0 && devices <= request.most_devices, "devices = {}; accepted: 1 to {}", devices,
          request.most_devices);
  // So that no product of bytes below can wrap round.
  const double kv_bytes = static_cast<double>(request.context) * static_cast<double>(request.batch) *
                          static_cast<double>(m.layers) * static_cast<double>(m.token_bytes());
  require(kv_bytes < kMostBytes, "K and V of {} tokens in {} sequences have {:.3g} bytes; accepted: fewer than {:.3g}",
          request.context, request.batch, kv_bytes, kMostBytes);
}

Network network_for(const CapacityRequest& request, int devices) {
  return request.cluster.network(devices, request.cluster.devices_per_node);
}

// What each device carries of one sequence.
struct Carried {
  Shares shares;
  std::vector<std::uint64_t> tokens;  // [devices]
  std::uint64_t most_chunks = 0;
  std::uint64_t most_leaves = 0;  // that hold a chunk
  std::uint64_t most_nodes = 0;
};

Carried carry(const CapacityRequest& request, int devices) {
  const ReductionOrder order = order_for(request, devices);
  const Network network = network_for(request, devices);
  Carried out{Shares::weighted(order.branches, ranks_by_node(network.node_of_rank), {}), {}};
  const std::int64_t chunks = chunk_count(order, request.context);
  const std::size_t count = static_cast<std::size_t>(devices);
  std::vector<std::uint64_t> chunks_of(count, 0), leaves_of(count, 0);
  for (int leaf = 0; leaf < order.branches; ++leaf) {
    const std::uint64_t mine = wide(chunks_of_leaf(order, leaf, 0, chunks - 1));
    const std::size_t device = static_cast<std::size_t>(out.shares.rank_of(leaf));
    chunks_of[device] += mine;
    leaves_of[device] += mine > 0 ? 1 : 0;
  }
  for (std::size_t d = 0; d < count; ++d) {
    out.tokens.push_back(chunks_of[d] * wide(order.chunk_tokens));
    out.most_chunks = std::max(out.most_chunks, chunks_of[d]);
    out.most_leaves = std::max(out.most_leaves, leaves_of[d]);
    out.most_nodes = std::max<std::uint64_t>(out.most_nodes, out.shares.nodes_of(static_cast<int>(d)).size());
  }
  const int last = out.shares.rank_of(leaf_of_chunk(order, chunks - 1));
  out.tokens[static_cast<std::size_t>(last)] -= wide(chunks * order.chunk_tokens - request.context);
  return out;
}

// Devices that share one copy of the weights, where the fewest do: on the last node.
int weight_parts(const CapacityRequest& request, int devices) {
  if (!request.split_weights) return 1;
  const int on_node = request.cluster.devices_per_node;
  return (devices - 1) % on_node + 1;
}

ReductionSize reduction_size(const CapacityRequest& request, const Carried& carried) {
  ReductionSize size{.rows = request.batch * request.model.heads, .v_dim = request.model.head_dim};
  for (const std::uint64_t tokens : carried.tokens) {
    size.kv_bytes_of_rank.push_back(tokens * wide(request.batch) * request.model.token_bytes());
  }
  size.attention_bytes_per_s = request.cluster.device_bytes_per_s;
  return size;
}

// Floats of one token between its layers: x and its norm, q, k and v, the attention's result, gate and up, their
// product, the logits.
std::uint64_t activation_floats(const ModelSize& m) {
  return wide(2 * m.hidden + 2 * (m.heads + m.kv_heads) * m.head_dim + 3 * m.feed_forward + m.vocab);
}

// States that arrive at once, at most.
std::uint64_t largest_message(Strategy strategy, const Network& network, const Shares& shares) {
  if (shares.ranks() == 1 || strategy == Strategy::kRing) return 0;
  if (!same_bits(strategy)) return 1;
  const Schedule schedule = make_schedule(strategy, network.node_of_rank);
  std::size_t most = 0;
  for (const auto& round : states_of(schedule, shares, true)) {
    for (const std::size_t states : round) most = std::max(most, states);
  }
  // Every rank of a gather keeps what came in all rounds: about twice the last one.
  return strategy == Strategy::kGather ? 2 * most : most;
}

DeviceBytes bytes_of(const CapacityRequest& request, int devices, Strategy strategy, const Carried& carried,
                     const ReductionSize& size) {
  const std::uint64_t share =
      carried.most_chunks * wide(request.chunk_tokens) * wide(request.batch) * request.model.token_bytes();
  DeviceBytes bytes;
  bytes.weights = base::divide_up(request.model.weight_bytes, wide(weight_parts(request, devices)));
  bytes.kv = share * wide(request.model.layers);
  const std::uint64_t arriving = largest_message(strategy, network_for(request, devices), carried.shares);
  bytes.states = (carried.most_leaves + carried.most_nodes + arriving) * size.state_bytes();
  bytes.workspace = wide(request.batch) * activation_floats(request.model) * sizeof(float);
  if (strategy == Strategy::kRing && devices > 1) bytes.workspace += share;
  return bytes;
}

// Reading the weights takes as long for one sequence as for many, until the products do.
double weights_seconds(const CapacityRequest& request, int parts) {
  const ModelSize& m = request.model;
  const double reading = static_cast<double>(m.read_weight_bytes) / request.cluster.device_bytes_per_s;
  const double flops = 2.0 * static_cast<double>(m.read_weights) * static_cast<double>(request.batch);
  const double multiplying = request.cluster.device_flops_per_s > 0 ? flops / request.cluster.device_flops_per_s : 0;
  return std::max(reading, multiplying) / parts;
}

// After attention and after the feed-forward of every layer the parts of the hidden row are added up: by exchange over
// the devices of a node.
double split_seconds(const CapacityRequest& request, int parts) {
  const double steps = std::bit_width(static_cast<unsigned>(parts - 1));
  const double bytes = static_cast<double>(request.batch * request.model.hidden) * sizeof(float);
  const Link& link = request.cluster.local;
  return 2.0 * static_cast<double>(request.model.layers) * steps * (link.latency_s + bytes / link.bytes_per_s);
}

// The first of 1 to `most` that holds, where all after one that holds do too. None: `most` does not, or there is none.
template <typename Holds>
std::optional<int> first_of(int most, Holds holds) {
  if (most < 1 || !holds(most)) return std::nullopt;
  return base::bisect(most, 0, holds);
}

}  // namespace

ReductionOrder order_for(const CapacityRequest& request, int devices) {
  ReductionOrder order;
  order.chunk_tokens = request.chunk_tokens;
  order.branches = branches_for(devices);
  return order;
}

StrategyPlan plan_strategy(const CapacityRequest& request, int devices, Strategy strategy) {
  check(request, devices);
  const Carried carried = carry(request, devices);
  const ReductionSize size = reduction_size(request, carried);
  StrategyPlan out;
  out.strategy = strategy;
  out.bytes = bytes_of(request, devices, strategy, carried, size);
  out.fits = out.bytes.total() <= request.usable_bytes();
  out.layer = cost_of(strategy, network_for(request, devices), carried.shares, size);
  const double layers = static_cast<double>(request.model.layers);
  const std::uint64_t most = *std::max_element(size.kv_bytes_of_rank.begin(), size.kv_bytes_of_rank.end());
  const double attending = layers * static_cast<double>(most) / request.cluster.device_bytes_per_s;
  out.seconds.kv = attending + layers * request.cluster.launch_s;
  out.seconds.exchange = std::max(0.0, layers * out.layer.seconds - attending);
  const int parts = weight_parts(request, devices);
  out.seconds.weights = weights_seconds(request, parts);
  out.seconds.split_weights = split_seconds(request, parts);
  return out;
}

std::vector<StrategyPlan> plan_strategies(const CapacityRequest& request, int devices) {
  std::vector<StrategyPlan> plans;
  for (const Strategy strategy : kAllStrategies) {
    if (same_bits(strategy)) plans.push_back(plan_strategy(request, devices, strategy));
  }
  std::stable_sort(plans.begin(), plans.end(), [](const StrategyPlan& a, const StrategyPlan& b) {
    return a.fits != b.fits ? a.fits : a.seconds.total() < b.seconds.total();
  });
  return plans;
}

bool fits(const CapacityRequest& request, int devices) {
  check(request, devices);
  const Carried carried = carry(request, devices);
  return bytes_of(request, devices, Strategy::kMerge, carried, reduction_size(request, carried)).total() <=
         request.usable_bytes();
}

std::optional<int> fewest_devices(const CapacityRequest& request) {
  // Whole nodes first, then the devices of the last one: with split weights, a device that is alone on its node holds
  // all of them, so one device more may be too many.
  const int on_node = request.cluster.devices_per_node;
  const int most_nodes = request.most_devices / on_node;
  const std::optional<int> nodes = first_of(most_nodes, [&](int n) { return fits(request, n * on_node); });
  const int before = (nodes ? *nodes - 1 : most_nodes) * on_node;
  const std::optional<int> rest =
      first_of(std::min(on_node, request.most_devices - before), [&](int n) { return fits(request, before + n); });
  return rest ? std::optional(before + *rest) : std::nullopt;
}

std::int64_t longest_context(const CapacityRequest& request, int devices) {
  const auto fits_with = [&](std::int64_t context) {
    CapacityRequest trial = request;
    trial.context = context;
    return fits(trial, devices);
  };
  if (!fits_with(1)) return 0;
  // No more than fills the memory of all, and no more than is accepted.
  const double token =
      static_cast<double>(request.batch * request.model.layers) * static_cast<double>(request.model.token_bytes());
  const double room = std::floor(static_cast<double>(request.usable_bytes()) * devices / token);
  const double too_long = std::min({room + 1, std::ceil(kMostBytes / token), static_cast<double>(kMostContext) + 1});
  return base::bisect(std::int64_t{1}, static_cast<std::int64_t>(too_long), fits_with);
}

}  // namespace treeattn::plan
