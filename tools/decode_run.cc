// SPDX-License-Identifier: Apache-2.0
// How it is measured: a call is timed between two barriers, and a sample is the slowest rank's time. The strategies
// take turns, call by call, so that whatever else the machine does hits them all alike.
#include "decode_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <utility>

#include "allocation_counter.h"
#include "base/available_memory.h"
#include "base/round_up.h"
#include "base/timing.h"
#include "bench_data.h"
#include "decode_data.h"
#include "kernels/cuda/ranks/rank_device.h"
#include "launched_ranks.h"
#include "parallel/agree.h"
#include "parallel/tree_attention.h"
#include "plan/cost.h"
#include "progress.h"
#include "table.h"
#include "treeattn/cuda.h"
#include "treeattn/parallel_attention.h"

namespace treeattn::tools {
namespace {

constexpr int kLeastRepeats = 5, kMostRepeats = 1000;
constexpr int kLeastRingRepeats = 2, kMostRingRepeats = 5;
constexpr int kReduceRepeats = 51, kQuickReduceRepeats = 21;

void max_of_ranks(Communicator& world, std::span<double> values) {
  parallel::combine_over_ranks(world, values, parallel::larger<double>);
}

std::uint64_t sum_of_ranks(Communicator& world, std::uint64_t value) {
  parallel::combine_over_ranks(world, std::span(&value, 1), std::plus<>());
  return value;
}

// FNV-1a.
std::uint64_t hash_bits(std::span<const float> values, std::uint64_t hash = 0xcbf29ce484222325ull) {
  for (const std::byte byte : std::as_bytes(values)) {
    hash = (hash ^ static_cast<std::uint64_t>(byte)) * 0x100000001b3ull;
  }
  return hash;
}

struct Output {
  std::vector<float> out, lse;
  std::uint64_t hash() const { return hash_bits(lse, hash_bits(out)); }
};

// A strategy on the way to its line. Samples are this rank's until they are gathered.
struct Entry {
  Entry(const std::shared_ptr<Communicator>& world, Strategy strategy, DeviceLink link, bool canonical)
      : attention(world, {.strategy = strategy, .canonical = canonical, .link = link}) {
    line.strategy = strategy;
  }
  bool is_ring() const { return line.strategy == Strategy::kRing; }

  ParallelAttention attention;
  DecodeLine line;
  Output output;
  std::size_t repeats = 0;
  std::vector<double> seconds, attending, reducing;
};

// K and V of the ranks that share this memory, of a host or of a GPU, on a host their results as well, and what is free
// in it. The ring holds another share.
struct Room {
  std::string where;
  std::size_t tree = 0;
  std::size_t ring = 0;
  std::size_t available = 0;
};

Room room_of(const Communicator& world, const DecodeSetup& setup) {
  const Device& device = setup.device;
  const RankPlace place = place_of_rank(world, device);
  Room room;
  room.where = device.on_gpu() ? fmt::format("on GPU {}", place.gpu) : "a host";
  // A cache has whole pages, and the first ones of all sequences are on the same rank.
  const std::int64_t chunk = setup.order.chunk_tokens;
  Shape first = setup.shape, whole = setup.shape;
  first.tokens = chunk;
  whole.tokens = base::round_up(whole.tokens, chunk);
  const auto number = [](std::size_t bytes) { return static_cast<double>(bytes); };  // whose sums do not wrap round
  const double first_pages = number(first.cache_bytes()), ranks = place.sharing;
  const double share = std::max(first_pages, number(whole.cache_bytes()) / world.size() * ranks);
  double tree = share + first_pages;  // the cache whose reductions are timed has first pages only
  if (!device.on_gpu()) {
    // Seen with many queries: that of every strategy twice, the reference in double, and states on their way.
    const double results = 2 * number(setup.strategies.size()) + 10;
    tree += ranks * (number(setup.shape.q_bytes()) + results * number(setup.shape.out_bytes()));
  }
  room.tree = static_cast<std::size_t>(std::min(tree, 0x1p63));
  room.ring = static_cast<std::size_t>(std::min(tree + share, 0x1p63));
  // Where addresses are limited, caches reserve no more than half of what is left, the later ones less.
  const std::size_t addresses = base::available_addresses() / 4;
  const std::size_t on_host = std::min(base::available_memory().value_or(addresses), addresses);
  room.available = (device.on_gpu() ? cuda_free_bytes(place.gpu) : on_host) / 10 * 9;
  return room;
}

class RankBench {
 public:
  RankBench(const std::shared_ptr<Communicator>& world, const DecodeSetup& setup, std::span<const Strategy> strategies)
      : world_(world),
        setup_(setup),
        pool_(setup.threads),
        q_memory_(make_queries(setup.shape, setup.seed)),
        first_query_(static_cast<std::size_t>(setup.shape.batch), 0),
        preparing_(progress_line("making keys and values", 0)),
        cache_(world, config(setup), {}, place_of_rank(*world, setup.device).gpu),
        ids_(fill_cache(cache_, setup.shape, setup.shape.tokens, setup.seed, pool_)),
        small_cache_(world, config(setup), {}, cache_.gpu()),
        small_ids_(fill_cache(small_cache_, setup.shape, 1, setup.seed, pool_)) {
    const Shape& s = setup.shape;
    q_ = QueryView::dense(q_memory_.as<std::byte>(), s.q_dtype, s.batch, s.queries, s.heads, s.head_dim);
    for (const Strategy strategy : strategies) {
      entries_.push_back(std::make_unique<Entry>(world, strategy, setup.link, setup.canonical));
    }
    preparing_.reset();
  }

  void run(DecodeResult& result) {
    Entry canonical(world_, Strategy::kMerge, setup_.link, true);
    auto progress = progress_line("computing what the results are compared with", 0);
    call(canonical, cache_, ids_);
    const DecodeReference reference = reference_decode(cache_, ids_, q_, pool_);
    progress.reset();
    first_calls();
    time_calls();
    time_reductions();
    for (const auto& entry : entries_) {
      finish(*entry, reference);
      check(*entry, canonical.output, reference.largest_value, result.failures);
      if (entry->line.strategy == Strategy::kAuto) result.why = entry->attention.why();
      result.lines.push_back(entry->line);
    }
  }

 private:
  static KvCacheConfig config(const DecodeSetup& setup) {
    const Shape& s = setup.shape;
    return {1, s.kv_heads, s.head_dim, s.head_dim, s.dtype, s.dtype, setup.order};
  }

  double call(Entry& entry, const KvCache& cache, std::span<const SequenceId> ids) {
    const std::size_t rows = static_cast<std::size_t>(q_.batch * q_.queries * q_.heads);
    entry.output.out.resize(rows * static_cast<std::size_t>(setup_.shape.head_dim));
    entry.output.lse.resize(rows);
    world_->barrier();
    const auto start = base::Clock::now();
    entry.attention.decode(cache, 0, ids, q_, {}, entry.output.out, entry.output.lse, pool_, Result::kReplicated,
                           first_query_);
    return base::seconds_since(start);
  }

  // What one call allocates at its peak.
  double metered_call(Entry& entry, std::size_t& extra_bytes) {
    const RankPeak peak(*world_);
    const double seconds = call(entry, cache_, ids_);
    extra_bytes = peak.bytes();
    return parallel::largest_of_ranks(*world_, seconds);
  }

  // The first call makes what is made once (and kAuto its choice); the second one is looked at closely. The ring has
  // nothing of the kind and takes long.
  void first_calls() {
    auto progress = progress_line("first calls", entries_.size());
    for (const auto& entry : entries_) {
      if (progress) progress->step(std::string(strategy_name(entry->line.strategy)));
      if (!entry->is_ring()) call(*entry, cache_, ids_);
      DecodeLine& line = entry->line;
      const double seconds = metered_call(*entry, line.peak_bytes);
      line.peak_bytes += cache_.allocated_bytes() + setup_.shape.q_bytes() + setup_.shape.out_bytes();
      if (entry->is_ring()) line.peak_bytes += cache_.store().workspace_bytes();
      const CallReport& report = entry->attention.report();
      line.chosen = report.strategy;
      line.steps = report.traffic.steps;
      line.bytes = report.traffic.bytes;
      line.remote_bytes = report.traffic.remote_bytes;
      line.out_hash = entry->output.hash();
      const bool ring = report.strategy == Strategy::kRing;
      const double fit = (setup_.quick ? 0.2 : 1.0) / seconds;
      const double fitted = ring ? std::clamp<double>(fit, kLeastRingRepeats, kMostRingRepeats)
                                 : std::clamp<double>(fit, kLeastRepeats, kMostRepeats);
      entry->repeats = static_cast<std::size_t>(setup_.repeat > 0 ? setup_.repeat : fitted);
    }
  }

  void time_calls() {
    std::size_t rounds = 0, total = 0;
    for (const auto& entry : entries_) {
      rounds = std::max(rounds, entry->repeats);
      total += entry->repeats;
    }
    auto progress = progress_line("timing", total);
    for (std::size_t i = 0; i < rounds; ++i) {
      // Every round begins with another one: nobody always comes after the ring.
      for (std::size_t e = 0; e < entries_.size(); ++e) {
        const auto& entry = entries_[(i + e) % entries_.size()];
        // A strategy with fewer repeats has them spread over all rounds.
        if (i * entry->repeats / rounds == (i + 1) * entry->repeats / rounds) continue;
        if (progress) progress->step(std::string(strategy_name(entry->line.strategy)));
        entry->seconds.push_back(call(*entry, cache_, ids_));
        entry->attending.push_back(entry->attention.report().local_seconds);
      }
    }
  }

  // With one token per sequence the same states travel and next to nothing is attended to.
  void time_reductions() {
    const int repeats = setup_.quick ? kQuickReduceRepeats : kReduceRepeats;
    auto progress = progress_line("timing reductions", static_cast<std::size_t>(repeats));
    for (int i = -2; i < repeats; ++i) {
      if (progress && i >= 0) progress->step("");
      for (const auto& entry : entries_) {
        if (entry->line.chosen == Strategy::kRing) continue;
        Output kept = entry->output;
        const double seconds = call(*entry, small_cache_, small_ids_);
        entry->output = std::move(kept);
        if (i >= 0) entry->reducing.push_back(seconds);
      }
    }
  }

  // From this rank's figures to all ranks'.
  void finish(Entry& entry, const DecodeReference& reference) {
    DecodeLine& line = entry.line;
    max_of_ranks(*world_, entry.seconds);
    max_of_ranks(*world_, entry.attending);
    max_of_ranks(*world_, entry.reducing);
    line.ms = 1e3 * base::median(entry.seconds);
    const bool ring = line.chosen == Strategy::kRing;
    line.reduce_ms =
        ring ? std::max(0.0, line.ms - 1e3 * base::median(entry.attending)) : 1e3 * base::median(entry.reducing);
    line.steps = parallel::largest_of_ranks(*world_, line.steps);
    line.bytes = sum_of_ranks(*world_, line.bytes);
    line.remote_bytes = sum_of_ranks(*world_, line.remote_bytes);
    line.peak_bytes = parallel::largest_of_ranks(*world_, line.peak_bytes);
    double error = 0;
    for (std::size_t i = 0; i < reference.out.size(); ++i) {
      const double difference = std::fabs(static_cast<double>(entry.output.out[i]) - reference.out[i]);
      if (!(difference <= error)) error = difference;
    }
    line.max_error = parallel::largest_of_ranks(*world_, error);
    add_formulas(line);
  }

  void add_formulas(DecodeLine& line) const {
    const Shape& s = setup_.shape;
    const bool ring = line.chosen == Strategy::kRing;
    plan::Network network;
    network.local = network.remote = {0, 1};  // only bytes are asked for
    network.node_of_rank = world_->node_of_rank();
    plan::ReductionSize size;
    size.rows = s.batch * s.queries * s.heads;
    size.v_dim = s.head_dim;
    size.kv_bytes_of_rank = parallel::kv_bytes_of_ranks(cache_.store(), ids_);
    line.formula_bytes = plan::cost_of(line.chosen, network, cache_.store().shares(), size, setup_.canonical).bytes;

    // The paper has one query and as many KV heads as heads: with b query tokens in all, t is what keeps K and V right.
    const double p = world_->size(), b = static_cast<double>(s.batch * s.queries);
    const double heads = static_cast<double>(s.heads), d = heads * static_cast<double>(s.head_dim);
    const double t = static_cast<double>(s.batch * s.tokens * s.kv_heads) / (p * b * heads);
    const double element = static_cast<double>(dtype_size(s.dtype));
    line.paper_bytes =
        ring ? 2 * b * t * d * (p - 1) * element : sizeof(float) * plan::paper::tree_volume(b, d, heads, p);
    line.formula_peak_bytes = static_cast<std::size_t>(
        element * (ring ? plan::paper::ring_peak_memory(b, t, d) : plan::paper::tree_peak_memory(b, t, d, heads)));
  }

  // Collective. The bits of all ranks are the same; those of `canonical` where that is promised, and close where not.
  void check(const Entry& entry, const Output& canonical, double largest_value, std::vector<std::string>& failures) {
    const std::string_view name = strategy_name(entry.line.strategy);
    const std::vector<std::uint64_t> hashes = parallel::gathered(*world_, entry.line.out_hash);
    for (std::size_t r = 1; r < hashes.size(); ++r) {
      if (hashes[r] == hashes[0]) continue;
      failures.push_back(
          fmt::format("{}: rank {} has other bits than rank 0 ({:016x}, {:016x})", name, r, hashes[r], hashes[0]));
      return;
    }
    if (setup_.promises_bits(entry.line.chosen)) {
      const bool other = parallel::largest_of_ranks(*world_, hashes[0] == canonical.hash() ? 0 : 1) != 0;
      if (other) failures.push_back(fmt::format("{}: other bits ({:016x}) than merge", name, hashes[0]));
      return;
    }
    const double worst = parallel::largest_of_ranks(*world_, distance_in_bounds(entry, canonical, largest_value));
    if (!(worst <= 1)) {
      failures.push_back(fmt::format("{}: out is {:.2g} times its bound away from merge's", name, worst));
    }
  }

  // The local states are the same; only the reduction differs. On its way to the root a state is rescaled at most
  // log2 B times by merge, and by the others 2 log2 B times inside the rank, once to the maximum of all, and added
  // ceil(log2 p) times. Every time its weight gets the error of exp2, 2^-22, and up to four roundings u. out is a
  // weighted mean of values, so weights that are off by e move it by at most 2 e max|v|; 3 more roundings finalize.
  //
  // The paper weighs by lse alone, one float: parts that count have one within 126 powers of two of the largest, so
  // their weights are off by 2u (|lse| + 126), and as much again for the logarithm and the normalised o.
  double distance_in_bounds(const Entry& entry, const Output& canonical, double largest_value) const {
    constexpr double u = 0x1p-24;
    const double levels = std::log2(setup_.order.branches);
    const double rounds = std::bit_width(static_cast<unsigned>(world_->size() - 1));
    const double common = 2 * (3 * levels + rounds + 3) * (0x1p-22 + 4 * u);
    const std::size_t dim = static_cast<std::size_t>(setup_.shape.head_dim);
    double worst = 0;
    for (std::size_t i = 0; i < canonical.out.size(); ++i) {
      const double lse = std::fabs(static_cast<double>(canonical.lse[i / dim]));
      const double weighed = entry.line.chosen == Strategy::kPaper ? 8 * u * (lse + 126) : 0;
      const double difference =
          std::fabs(static_cast<double>(entry.output.out[i]) - static_cast<double>(canonical.out[i]));
      const double distance = difference / (largest_value * (common + weighed));
      if (!(distance <= worst)) worst = distance;
    }
    return worst;
  }

  std::unique_ptr<Progress> progress_line(const char* what, std::size_t steps) const {
    return world_->rank() == 0 ? std::make_unique<Progress>(what, steps) : nullptr;
  }

  std::shared_ptr<Communicator> world_;
  const DecodeSetup& setup_;
  ThreadPool pool_;
  base::Buffer q_memory_;
  QueryView q_;
  std::vector<std::int64_t> first_query_;  // no mask asks for it
  std::unique_ptr<Progress> preparing_;    // while the caches are filled
  KvCache cache_;
  std::vector<SequenceId> ids_;
  KvCache small_cache_;
  std::vector<SequenceId> small_ids_;
  std::vector<std::unique_ptr<Entry>> entries_;
};

}  // namespace

const DecodeLine* DecodeResult::find(Strategy strategy) const {
  const auto found =
      std::find_if(lines.begin(), lines.end(), [&](const auto& line) { return line.strategy == strategy; });
  return found == lines.end() ? nullptr : &*found;
}

DecodeResult run_decode(const std::shared_ptr<Communicator>& world, const DecodeSetup& setup) {
  DecodeResult result;
  result.transport = world->transport();
  result.ranks = world->size();
  result.hosts = world->nodes();
  const RankPlace place = place_of_rank(*world, setup.device);
  result.device = setup.device.name_of_rank(place.number);
  Room room;
  on_all_or_none(*world, [&] {
    kernels::cuda::stay_on_gpu(place.gpu);
    room = room_of(*world, setup);
  });
  std::vector<Strategy> fitting;
  for (const Strategy strategy : setup.strategies) {
    const std::size_t needed = strategy == Strategy::kRing ? room.ring : room.tree;
    const bool short_of = needed > room.available;
    if (parallel::largest_of_ranks(*world, short_of ? 1 : 0) == 0) {
      fitting.push_back(strategy);
    } else {
      result.skipped.push_back(fmt::format("{}: needs {} {}, {} of memory can be used", strategy_name(strategy),
                                           format_bytes(needed), room.where, format_bytes(room.available)));
    }
  }
  if (!fitting.empty()) RankBench(world, setup, fitting).run(result);
  return result;
}

}  // namespace treeattn::tools
