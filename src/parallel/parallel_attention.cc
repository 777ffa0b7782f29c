// SPDX-License-Identifier: Apache-2.0
// The public calls: check, run, report.
#include "treeattn/parallel_attention.h"

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/checksum.h"
#include "base/timing.h"
#include "parallel/agree.h"
#include "parallel/choose.h"
#include "parallel/choose_link.h"
#include "parallel/device_reduce.h"
#include "parallel/finalize.h"
#include "parallel/kv_format.h"
#include "parallel/ring_attention.h"
#include "parallel/tree_attention.h"
#include "treeattn/state.h"

namespace treeattn {

using base::require;
using parallel::DecodeCall;
using parallel::ReduceContext;
using parallel::SharedBuffer;
using parallel::StateShape;

namespace {

using base::Clock, base::seconds_since;

Traffic difference(const Traffic& now, const Traffic& before) {
  return {now.messages - before.messages, now.bytes - before.bytes, now.remote_messages - before.remote_messages,
          now.remote_bytes - before.remote_bytes, now.steps - before.steps};
}

void check_query(const QueryView& q, const KvCacheConfig& config, int layer) {
  require(layer >= 0 && layer < config.layers, "layer = {}; accepted: 0 to {}", layer, config.layers - 1);
  require(q.head_dim == config.k_dim, "q.head_dim = {}; accepted: the cache's k_dim, {}", q.head_dim, config.k_dim);
  require(q.heads >= 1 && q.heads % config.kv_heads == 0,
          "q.heads = {}; accepted: a multiple of the cache's kv_heads, {}", q.heads, config.kv_heads);
}

void check_result(std::size_t rows, std::int64_t v_dim, std::span<const float> out, std::span<const float> lse) {
  const std::size_t floats = rows * static_cast<std::size_t>(v_dim);
  require(out.size() == floats, "out holds {} floats; accepted: rows * v_dim = {}", out.size(), floats);
  require(lse.empty() || lse.size() == rows, "lse holds {} floats; accepted: 0 or rows = {}", lse.size(), rows);
  base::require_address("out", out);
  base::require_address("lse", lse);
  base::require_apart("out", out, "lse", lse);
}

std::uint32_t digest_of(std::span<const int> values) { return base::crc32c(std::as_bytes(values)); }

// Sinks of some heads: finalize_states goes round them row by row.
std::span<const float> sinks_of(std::span<const float> sinks, parallel::HeadRange heads) {
  if (sinks.empty()) return sinks;
  return sinks.subspan(static_cast<std::size_t>(heads.first), static_cast<std::size_t>(heads.last - heads.first));
}

}  // namespace

struct ParallelAttention::Impl {
  // A choice holds for one size of states, and for the shares of a cache.
  using SizeKey = std::pair<std::size_t, std::size_t>;
  struct Choices {
    plan::Shares shares;
    std::map<SizeKey, parallel::Choice> of_size;
  };
  // As many caches may take turns. More would be those of shares that a rebalance has left behind.
  static constexpr std::size_t kMostShares = 8;

  std::shared_ptr<Communicator> communicator;
  ParallelOptions options;
  CallReport report;
  std::map<Strategy, plan::Schedule> schedules;  // this rank's view
  bool same_options = false;                     // on all ranks, found out by the first call
  std::optional<plan::Network> network;
  std::vector<Choices> choices;  // the last that were asked for first
  std::string why;
  std::unique_ptr<parallel::DeviceReducer> devices;  // made by the first call that needs it
  std::optional<int> gpu;                            // that it is for

  const plan::Schedule& schedule_of(Strategy strategy) {
    auto found = schedules.find(strategy);
    if (found == schedules.end()) {
      const bool scheduled = same_bits(strategy) && strategy != Strategy::kRing;
      plan::Schedule schedule;
      if (scheduled)
        schedule = plan::make_schedule(strategy, communicator->node_of_rank()).seen_by(communicator->rank());
      found = schedules.emplace(strategy, std::move(schedule)).first;
    }
    return found->second;
  }

  Choices& choices_for(const plan::Shares& shares) {
    auto found = std::ranges::find(choices, shares, &Choices::shares);
    if (found == choices.end()) {
      if (choices.size() == kMostShares) choices.pop_back();
      found = choices.insert(choices.end(), {shares, {}});
    }
    std::rotate(choices.begin(), found, found + 1);
    return choices.front();
  }

  Strategy strategy_for(const DecodeCall& call, DeviceLink link, ThreadPool& pool) {
    if (options.strategy != Strategy::kAuto) return options.strategy;
    if (communicator->size() == 1) return Strategy::kMerge;
    if (link == DeviceLink::kPeer) {
      why = "states go from every GPU to every other in one kernel, whatever the strategy\n";
      return Strategy::kMerge;
    }
    const Traffic before = communicator->traffic();
    const bool by_host = link == DeviceLink::kHost;
    if (by_host && !network) network = parallel::measure_links(*communicator);
    Choices& known = choices_for(call.store.shares());
    const StateShape shape = call.shape();
    const SizeKey key{shape.rows, shape.row_floats};
    auto found = known.of_size.find(key);
    if (found == known.of_size.end()) {
      plan::ReductionSize size;
      size.rows = static_cast<std::int64_t>(shape.rows);
      size.v_dim = call.store.config().v_dim;
      size.kv_bytes_of_rank = parallel::kv_bytes_of_ranks(call.store, call.sequences);
      const ReduceContext context{*communicator, known.shares, pool, options.canonical};
      const parallel::Trial trial =
          by_host ? parallel::trial_by_host(context, shape) : trial_on_devices(call, context, shape);
      found = known.of_size.emplace(key, parallel::choose_strategy(context, by_host ? &*network : nullptr, size, trial))
                  .first;
    }
    communicator->reset_traffic(before);  // megabytes to find out, once: no part of what a decode sends
    why = found->second.why;
    return found->second.strategy;
  }

  // Ranks that differ would wait for each other, or add up what does not belong together. Collective, once for a cache
  // and once for this object: what every call would have to be asked is left to the caller.
  void check_same_on_ranks(const parallel::KvStore& store) {
    if (same_options && store.same_on_ranks()) return;
    const std::array how{static_cast<int>(options.strategy), static_cast<int>(options.canonical),
                         static_cast<int>(options.link)};
    parallel::require_same(*communicator, std::array<parallel::Given, 4>{{
                                              {"ParallelOptions", digest_of(how)},
                                              {"nodes (TREEATTN_NODES)", digest_of(communicator->node_of_rank())},
                                              {"sequences or types", parallel::digest(parallel::describe(store))},
                                              {"weights", parallel::digest(store.shares())},
                                          }});
    check_same_kernels(store);
    same_options = true;
    store.found_same_on_ranks();
  }

  // Bits are those of an instruction set, or of the kernels of a GPU's compute capability.
  void check_same_kernels(const parallel::KvStore& store) {
    const bool on_gpus = options.link == DeviceLink::kNccl || options.link == DeviceLink::kPeer;
    if (!options.canonical && !on_gpus) return;
    constexpr std::size_t kName = 32;
    std::array<char, kName> mine{};
    parallel::kernels_of(store).copy(mine.data(), kName - 1);
    std::vector<std::string> all;
    for (const auto& name : parallel::gathered(*communicator, mine)) {
      all.push_back(parallel::text_of(static_cast<int>(all.size()), name));
    }
    for (std::size_t r = 0; r < all.size(); ++r) {
      require(!on_gpus || all[r].starts_with("CUDA"),
              "link = {} with rank {} computing with {}; accepted: a cache on GPUs, on every rank",
              parallel::link_name(options.link), r, all[r]);
      require(!options.canonical || all[r] == all[0],
              "rank {} computes with {} and rank 0 with {}; accepted: GPUs of one compute capability on all ranks, or "
              "one instruction set (TREEATTN_ISA), or canonical = false",
              r, all[r], all[0]);
    }
  }

  // Before anything is sent.
  void check(const KvCache& cache, const DecodeCall& call) {
    require(cache.communicator() == communicator, "the cache is on another communicator; accepted: the same one");
    require(call.q.batch == static_cast<std::int64_t>(call.sequences.size()),
            "q.batch = {}; accepted: one per sequence, {}", call.q.batch, call.sequences.size());
    base::require_address("sequences", call.sequences);
    for (const SequenceId sequence : call.sequences) call.store.require_agreed(sequence);
    check_query(call.q, cache.config(), call.layer);
    parallel::check_call(call);
  }

  // The same of a prefill. Returns what this rank carries of it.
  std::vector<TokenRange> check_prefill(const KvCache& cache, int layer, SequenceId sequence, std::int64_t first,
                                        std::int64_t count, const QueryView& q) {
    require(cache.communicator() == communicator, "the cache is on another communicator; accepted: the same one");
    check_query(q, cache.config(), layer);
    cache.store().require_agreed(sequence);
    std::vector<TokenRange> queries = cache.carried(sequence, first, count);
    std::int64_t tokens = 0;
    for (const TokenRange& range : queries) tokens += range.count;
    require(q.batch == 1 && q.queries == tokens,
            "q holds [{}, {}] queries; accepted: [1, {}], the tokens of [{}, {}) that this rank carries", q.batch,
            q.queries, tokens, first, first + count);
    return queries;
  }

  // Runs `work`, which returns the seconds spent attending, and reports on it.
  template <class Work>
  void reported(Strategy strategy, const Work& work) {
    const Traffic before = communicator->traffic();
    const auto start = Clock::now();
    report = {};
    report.strategy = strategy;
    report.local_seconds = work();
    const double all = seconds_since(start);
    report.reduce_seconds = all - report.local_seconds;
    report.traffic = difference(communicator->traffic(), before);
  }

  // The GPU of a call whose states travel from GPU to GPU.
  kernels::cuda::RankDevice& device_of(const parallel::KvStore& store) {
    const DeviceLink link = parallel::link_of(options, store);
    // What the ranks compared may have been another cache, or this one for another link.
    require(store.device() != nullptr, "link = {} with a cache in the host's memory; accepted: a cache on GPUs",
            parallel::link_name(link));
    if (!devices) devices = link == DeviceLink::kNccl ? parallel::nccl_reducer() : parallel::peer_reducer();
    kernels::cuda::RankDevice& device = *store.device();
    if (!gpu) gpu = device.gpu();
    require(*gpu == device.gpu(), "a cache on GPU {}; accepted: {}, as in the first call", device.gpu(), *gpu);
    return device;
  }

  // Before a prompt is worked on: what decode will need and cannot have is found out now.
  void connect(const parallel::KvStore& store) {
    const bool by_host = options.strategy == Strategy::kRing || communicator->size() == 1;
    if (by_host || parallel::link_of(options, store) == DeviceLink::kHost) return;
    kernels::cuda::RankDevice& device = device_of(store);
    devices->connect(*communicator, device);
  }

  // With the states of a call, which are made anew each time, as a reduction uses them up.
  parallel::Trial trial_on_devices(const DecodeCall& call, const ReduceContext& context, StateShape shape) {
    return [this, &call, context, shape](Strategy strategy, const plan::Schedule& schedule) {
      kernels::cuda::RankDevice& device = device_of(call.store);
      const SharedBuffer root = parallel::make_shared_buffer(shape.block_floats());
      float* own = parallel::attend_on_device(call, devices->place(context, shape, device));
      device.finish();
      communicator->barrier();
      const auto start = Clock::now();
      devices->reduce(strategy, schedule, context, shape, own, device, root->as<float>());
      return seconds_since(start);
    };
  }

  // The root's states, from GPU to GPU.
  SharedBuffer reduce_on_devices(const DecodeCall& call, Strategy strategy, ThreadPool& pool) {
    kernels::cuda::RankDevice& device = device_of(call.store);
    const ReduceContext context{*communicator, call.store.shares(), pool, options.canonical};
    const StateShape shape = call.shape();
    SharedBuffer root = parallel::make_shared_buffer(shape.block_floats());
    float* own = parallel::attend_on_device(call, devices->place(context, shape, device));
    devices->reduce(strategy, schedule_of(strategy), context, shape, own, device, root->as<float>());
    return root;
  }

  // The root's states of all heads, or of this rank's.
  SharedBuffer reduce(const DecodeCall& call, Strategy strategy, Result result, SharedBuffer own, ThreadPool& pool) {
    const ReduceContext context{*communicator, call.store.shares(), pool, options.canonical};
    if (result == Result::kByHeads) return parallel::reduce_states_by_heads(context, call, std::move(own));
    return parallel::reduce_states(strategy, schedule_of(strategy), context, call.shape(), std::move(own));
  }
};

ParallelAttention::ParallelAttention(std::shared_ptr<Communicator> communicator, ParallelOptions options)
    : impl_(std::make_unique<Impl>()) {
  require(communicator != nullptr, "communicator = null; accepted: a communicator");
  strategy_name(options.strategy);  // throws for one that does not exist
  require(options.link <= DeviceLink::kAuto, "link = {}; accepted: 0 (host), 1 (nccl), 2 (peer), 3 (auto)",
          static_cast<int>(options.link));
  impl_->communicator = std::move(communicator);
  impl_->options = options;
}

ParallelAttention::~ParallelAttention() = default;

void ParallelAttention::decode(const KvCache& cache, int layer, std::span<const SequenceId> sequences,
                               const QueryView& q, const AttentionOptions& options, std::span<float> out,
                               std::span<float> lse, ThreadPool& pool, Result result,
                               std::span<const std::int64_t> first_query) {
  const DecodeCall call{cache.store(), layer, sequences, q, options, first_query};
  const KvCacheConfig& config = cache.config();
  require(result <= Result::kByHeads, "result = {}; accepted: 0 (replicated), 1 (by heads)", static_cast<int>(result));
  impl_->check(cache, call);  // before anything is sent
  const int size = impl_->communicator->size();
  const bool by_heads = result == Result::kByHeads;
  require(!(by_heads && impl_->options.strategy == Strategy::kRing),
          "strategy = ring with a result by heads; accepted: replicated");
  const parallel::HeadRange heads =
      by_heads ? parallel::heads_of_rank(q.heads, impl_->communicator->rank(), size) : parallel::HeadRange{0, q.heads};
  const std::size_t rows = static_cast<std::size_t>(q.batch * q.queries * (heads.last - heads.first));
  check_result(rows, config.v_dim, out, lse);
  impl_->check_same_on_ranks(cache.store());

  const DeviceLink link = by_heads ? DeviceLink::kHost : parallel::link_of(impl_->options, call.store);
  // By heads there is one way, whatever the strategy: nothing to choose.
  const bool nothing_to_choose = by_heads && impl_->options.strategy == Strategy::kAuto;
  const Strategy strategy = nothing_to_choose ? Strategy::kMerge : impl_->strategy_for(call, link, pool);
  SharedBuffer root;
  impl_->reported(strategy, [&] {
    double attending = 0;
    if (strategy == Strategy::kRing) {
      root = parallel::ring_decode(call, pool, attending);
    } else if (link != DeviceLink::kHost) {
      root = impl_->reduce_on_devices(call, strategy, pool);
    } else {
      const auto start = Clock::now();
      SharedBuffer own = parallel::attend_locally(call, pool);
      attending = seconds_since(start);
      root = impl_->reduce(call, strategy, result, std::move(own), pool);
    }
    return attending;
  });
  if (rows == 0) return;
  parallel::finalize_on(pool, {root->as<float>(), rows * state_floats(config.v_dim)}, config.v_dim,
                        sinks_of(options.sinks, heads), out, lse);
}

bool ParallelAttention::decode_on_device(const KvCache& cache, int layer, std::span<const SequenceId> sequences,
                                         const QueryView& q, const AttentionOptions& options, float* out, void* stream,
                                         ThreadPool& pool) {
  const DecodeCall call{cache.store(), layer, sequences, q, options, {}};
  impl_->check(cache, call);
  require(out != nullptr, "out = null; accepted: memory of the cache's GPU");
  impl_->check_same_on_ranks(cache.store());
  if (impl_->options.strategy == Strategy::kRing || !options.sinks.empty()) return false;
  if (parallel::link_of(impl_->options, call.store) != DeviceLink::kPeer) return false;
  kernels::cuda::RankDevice& device = impl_->device_of(call.store);
  const ReduceContext context{*impl_->communicator, call.store.shares(), pool, impl_->options.canonical};
  const StateShape shape = call.shape();
  confirm();
  float* place = impl_->devices->place(context, shape, device);
  impl_->reported(Strategy::kMerge, [&] {
    device.wait_for(stream);
    parallel::attend_on_device(call, place, true);
    impl_->devices->reduce_on_gpu(context, shape, device, {out}, device.stream());
    impl_->devices->count_sent(*impl_->communicator);
    device.hold_up(stream);
    return 0.0;
  });
  return true;
}

void ParallelAttention::confirm() {
  if (impl_->devices) impl_->devices->confirm(*impl_->communicator);
}

void ParallelAttention::prefill(const KvCache& cache, int layer, SequenceId sequence, std::int64_t first,
                                std::int64_t count, const QueryView& q, const AttentionOptions& options,
                                std::span<float> out, std::span<float> lse, ThreadPool& pool, bool gather_kv) {
  const std::vector<TokenRange> queries = impl_->check_prefill(cache, layer, sequence, first, count, q);
  check_result(static_cast<std::size_t>(q.queries * q.heads), cache.config().v_dim, out, lse);
  const parallel::PrefillCall call{cache.store(), layer, sequence, q, queries, options};
  parallel::check_call(call);  // before anything is sent
  impl_->check_same_on_ranks(cache.store());
  impl_->connect(cache.store());
  impl_->reported(Strategy::kRing, [&] {
    double attending = 0;
    parallel::ring_prefill(call, gather_kv, out, lse, pool, attending);
    return attending;
  });
}

void ParallelAttention::prefill_on_device(const KvCache& cache, int layer, SequenceId sequence, std::int64_t first,
                                          std::int64_t count, const QueryView& q, const AttentionOptions& options,
                                          float* out, void* stream) {
  const std::vector<TokenRange> queries = impl_->check_prefill(cache, layer, sequence, first, count, q);
  kernels::cuda::RankDevice* device = cache.store().device();
  require(device != nullptr, "prefill_on_device with a cache in the host's memory; accepted: one on a GPU");
  require(out != nullptr || q.queries == 0, "out = null; accepted: memory of the cache's GPU");
  const parallel::PrefillCall call{cache.store(), layer, sequence, q, queries, options};
  parallel::check_call(call);
  impl_->check_same_on_ranks(cache.store());
  impl_->connect(cache.store());
  impl_->reported(Strategy::kRing, [&] {
    device->wait_for(stream);
    parallel::prefill_on_device(call, out);
    device->hold_up(stream);
    return 0.0;
  });
}

const CallReport& ParallelAttention::report() const { return impl_->report; }

std::string ParallelAttention::why() const { return impl_->why; }

}  // namespace treeattn
