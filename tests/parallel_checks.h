// SPDX-License-Identifier: Apache-2.0
// What must hold of attention over a sharded cache, whatever carries the bytes: the same checks run over threads and
// over MPI. Every rank runs them; a check returns what went wrong, so that a failing rank does not leave the others
// waiting.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "kernels/case_list.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/cuda/error_model.h"
#include "parallel/agree.h"
#include "parallel/kv_store.h"
#include "plan/cost.h"
#include "treeattn/error.h"
#include "treeattn/parallel_attention.h"

namespace treeattn::testing_parallel {

using Failures = std::vector<std::string>;

inline bool same_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size_bytes()) == 0);
}

struct Output {
  std::vector<float> out, lse;
  bool same_bits_as(const Output& other) const { return same_bits(out, other.out) && same_bits(lse, other.lse); }

 private:
  static bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
    return testing_parallel::same_bits(std::span<const float>(a), std::span<const float>(b));
  }
};

// On which GPU a rank has its pages.
using GpuOf = std::function<int(int rank)>;
inline int on_host(int) { return KvCache::kHost; }

// One sequence of a batch, as a view of its own.
inline KvView sequence_view(const KvView& view, std::int64_t batch, std::int64_t length) {
  KvView out = view;
  out.batch = 1;
  out.tokens = length;
  const auto size = static_cast<std::int64_t>(dtype_size(view.dtype));
  if (view.page_tokens > 0) {
    out.page_table = view.page_table + batch * view.pages_per_sequence;
  } else {
    out.data = static_cast<const std::byte*>(view.data) + batch * view.batch_stride * size;
    if (view.scales != nullptr) out.scales = view.scales + batch * view.scale_batch_stride;
  }
  return out;
}

// A case of the one list, with the answer of one machine (bits) and of the oracle.
struct PreparedCase {
  explicit PreparedCase(kernels::Case shape, std::uint64_t seed, int gpu = KvCache::kHost)
      : data(moved_to_zero(std::move(shape)), seed) {
    ThreadPool pool(1);
    const kernels::Problem problem = kernels::make_problem(data.input(), data.options());
    kernels::ErrorModel model = kernels::error_model(kernels::active_target(), problem);
    if (gpu == KvCache::kHost) {
      single = empty_output();
      attention(data.input(), data.options(), single.out, single.lse, pool);
    } else {
      KvCache cache(self_communicator(), config(), {}, gpu);
      ParallelAttention one(cache.communicator(), {Strategy::kMerge});
      single = decode(one, cache, fill(cache), pool);
      model = kernels::cuda::error_model(cache.store().device()->kernel(), problem);
    }
    bound_by(model);
  }

  // What the results are held against where the bits are not promised. To be called before the first error().
  void bound_by(const kernels::ErrorModel& model) {
    in_free_order.model = model;
    // A rank merges its nodes one after the other, at most two a level; then come the other ranks, one after the other
    // at worst.
    constexpr int kMostRanks = 16;
    in_free_order.model.extra_merges = 2 * plan::log2_exact(data.shape().order.branches) + kMostRanks;
    as_in_paper.model = in_free_order.model;
    as_in_paper.model.lse_error = 4 * model.unit_roundoff;
  }

  // A cache starts at position 0.
  static kernels::Case moved_to_zero(kernels::Case shape) {
    for (auto& first : shape.first_query) first -= shape.first_key;
    shape.first_key = 0;
    return shape;
  }

  Output empty_output() const {
    const kernels::Case& s = data.shape();
    const auto rows = static_cast<std::size_t>(s.batch * s.queries * s.heads);
    return {std::vector<float>(rows * static_cast<std::size_t>(s.v_dim)), std::vector<float>(rows)};
  }

  KvCacheConfig config() const {
    const kernels::Case& s = data.shape();
    return {1, s.kv_heads, s.head_dim, s.v_dim, s.k_type, s.v_type, s.order};
  }

  std::vector<SequenceId> fill(KvCache& cache) const {
    const AttentionInput in = data.input();
    std::vector<SequenceId> ids;
    for (std::int64_t b = 0; b < data.shape().batch; ++b) {
      const std::int64_t length = data.length(b);
      ids.push_back(cache.add_sequence());
      const KvView k = sequence_view(in.k, b, length), v = sequence_view(in.v, b, length);
      cache.extend(ids.back(), length);
      if (length > 0) cache.write(ids.back(), 0, 0, k, v);
    }
    return ids;
  }

  Output decode(ParallelAttention& attention, const KvCache& cache, std::span<const SequenceId> ids,
                ThreadPool& pool) const {
    Output got = empty_output();
    attention.decode(cache, 0, ids, data.input().q, data.options(), got.out, got.lse, pool, Result::kReplicated,
                     data.shape().first_query);
    return got;
  }

  // The largest error in units of its bound, for a strategy that does not follow the canonical tree.
  double error(const Output& got, Strategy strategy) const {
    const Oracle& oracle = strategy == Strategy::kPaper ? as_in_paper : in_free_order;
    return kernels::worst_in_bounds(got.out, got.lse, oracle.answer(data));
  }

  // Asked when it is first needed, by whichever rank comes first: what is held against bits alone needs none.
  struct Oracle {
    kernels::ErrorModel model;

    const kernels::ReferenceResult& answer(const kernels::CaseData& data) const {
      std::call_once(asked, [&] {
        result = kernels::reference_attention(kernels::make_problem(data.input(), data.options()), model);
      });
      return result;
    }

   private:
    mutable std::once_flag asked;
    mutable kernels::ReferenceResult result;
  };

  kernels::CaseData data;
  Output single;         // of attention() on one machine, or of one rank on a GPU
  Oracle in_free_order;  // with the bound of merges that follow the ranks
  Oracle as_in_paper;    // and of parts that are weighed by their lse
};

inline std::vector<std::unique_ptr<PreparedCase>> prepared_cases(std::size_t every, std::size_t first = 0,
                                                                 int gpu = KvCache::kHost) {
  std::vector<std::unique_ptr<PreparedCase>> out;
  const std::vector<kernels::Case> list = kernels::case_list();
  for (std::size_t i = first; i < list.size(); i += every)
    out.push_back(std::make_unique<PreparedCase>(list[i], i + 1, gpu));
  return out;
}

// Whether all ranks hold the same bits.
inline bool all_ranks_agree(Communicator& world, const Output& output) {
  std::vector<float> mine = output.out;
  mine.insert(mine.end(), output.lse.begin(), output.lse.end());
  std::vector<float> all(mine.size() * static_cast<std::size_t>(world.size()));
  world.allgather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)));
  for (int r = 0; r < world.size(); ++r) {
    const auto part = std::span<const float>(all).subspan(static_cast<std::size_t>(r) * mine.size(), mine.size());
    if (!same_bits(part, std::span<const float>(mine))) return false;
  }
  return true;
}

// Uneven on purpose; every third rank carries nothing.
inline std::vector<double> uneven_weights(int ranks) {
  std::vector<double> weights(static_cast<std::size_t>(ranks));
  for (std::size_t r = 0; r < weights.size(); ++r) weights[r] = r % 3 == 2 ? 0.0 : 1.0 + 0.7 * static_cast<double>(r);
  return weights;
}

// Every strategy on every case: the bits of one machine where they are promised, the derived bound where not, and the
// same on all ranks always.
inline Failures check_strategies(const std::shared_ptr<Communicator>& world,
                                 std::span<const std::unique_ptr<PreparedCase>> cases,
                                 std::span<const double> weights = {}, const GpuOf& gpu_of = on_host,
                                 DeviceLink link = DeviceLink::kHost) {
  Failures failures;
  ThreadPool pool(1 + world->rank() % 2);
  struct Way {
    Strategy strategy;
    bool canonical;
    std::unique_ptr<ParallelAttention> attention;
  };
  std::vector<Way> ways;
  for (const Strategy strategy : kAllStrategies) {
    for (const bool canonical : {true, false}) {
      if (!canonical && (strategy == Strategy::kRing || !treeattn::same_bits(strategy))) continue;
      const ParallelOptions options{strategy, canonical, link};
      ways.push_back({strategy, canonical, std::make_unique<ParallelAttention>(world, options)});
    }
  }
  for (const auto& prepared : cases) {
    KvCache cache(world, prepared->config(), weights, gpu_of(world->rank()));
    const std::vector<SequenceId> ids = prepared->fill(cache);
    for (const auto& [strategy, canonical, attention] : ways) {
      const auto named = [&, strategy = strategy, canonical = canonical] {
        return fmt::format("{} by {}{} on {} ranks", prepared->data.shape().name, strategy_name(strategy),
                           canonical ? "" : " in free order", world->size());
      };
      Output got;
      try {
        got = prepared->decode(*attention, cache, ids, pool);
      } catch (const std::exception& error) {
        throw Error(named() + ": " + error.what());
      }
      const bool agree = all_ranks_agree(*world, got);
      const bool exact = canonical && treeattn::same_bits(strategy);
      // Where all have the same bits one rank judges them: as processes, each would have to ask the oracle for itself.
      const bool judged = agree && world->rank() != 0;
      const bool right = exact ? got.same_bits_as(prepared->single) : judged || prepared->error(got, strategy) <= 1;
      if (right && agree) continue;
      const char* wrong = agree ? (exact ? "other bits" : "beyond its bound") : "ranks disagree";
      failures.push_back(named() + ": " + wrong);
    }
  }
  return failures;
}

// Bytes sent by all ranks together, one call, against the cost model, and against the closed forms where the shares are
// nodes of the tree.
inline Failures check_bytes(const std::shared_ptr<Communicator>& world, std::span<const double> weights = {},
                            const GpuOf& gpu_of = on_host) {
  Failures failures;
  ThreadPool pool(1);
  kernels::Case shape;
  shape.name = "bytes";
  shape.batch = 2;
  shape.tokens = 1111;
  shape.lengths = {1111, 700};
  shape.order = {64, 16};
  const PreparedCase prepared(shape, 7);
  KvCache cache(world, prepared.config(), weights, gpu_of(world->rank()));
  const std::vector<SequenceId> ids = prepared.fill(cache);
  const int p = world->size();
  plan::Network network;
  network.node_of_rank = world->node_of_rank();
  const plan::Shares shares(p, {cache.rank_of_leaf().begin(), cache.rank_of_leaf().end()});
  plan::ReductionSize size;
  size.rows = shape.batch * shape.queries * shape.heads;
  size.v_dim = shape.v_dim;
  std::uint64_t kv_bytes = 0;
  const std::size_t token = static_cast<std::size_t>(shape.kv_heads * (shape.head_dim + shape.v_dim)) * 4;
  size.kv_bytes_of_rank.assign(static_cast<std::size_t>(p), 0);
  for (std::int64_t b = 0; b < shape.batch; ++b)
    kv_bytes += static_cast<std::uint64_t>(prepared.data.length(b)) * token;
  std::int64_t mine = 0;
  for (const SequenceId id : ids) mine += cache.carried_tokens(id);
  std::uint64_t my_bytes = static_cast<std::uint64_t>(mine) * token;
  world->allgather(std::as_bytes(std::span(&my_bytes, 1)), std::as_writable_bytes(std::span(size.kv_bytes_of_rank)));
  const bool aligned = weights.empty() && (p & (p - 1)) == 0 && p <= 16;
  for (const Strategy strategy : kAllStrategies) {
    for (const bool canonical : {true, false}) {
      ParallelAttention attention(world, {strategy, canonical});
      prepared.decode(attention, cache, ids, pool);
      std::uint64_t sums[3] = {attention.report().traffic.bytes, attention.report().traffic.messages,
                               attention.report().traffic.remote_bytes};
      parallel::combine_over_ranks(*world, std::span<std::uint64_t>(sums), std::plus<std::uint64_t>());
      const plan::Cost cost = plan::cost_of(strategy, network, shares, size, canonical);
      const std::uint64_t steps = attention.report().traffic.steps;
      const auto expect = [&](const char* what, std::uint64_t got, std::uint64_t want) {
        if (got == want) return;
        failures.push_back(fmt::format("{} of {} (canonical {}) on {} ranks: {}, formula {}", what,
                                       strategy_name(strategy), canonical, p, got, want));
      };
      expect("bytes", sums[0], cost.bytes);
      expect("bytes between nodes", sums[2], cost.remote_bytes);
      expect("steps", steps, cost.steps);
      if (strategy == Strategy::kRing) {
        expect("closed form", sums[0], plan::ring_decode_bytes(size.kv_bytes_of_rank));
        expect("closed form of all K and V", sums[0], static_cast<std::uint64_t>(p - 1) * kv_bytes);
      } else {
        expect("messages", sums[1], cost.messages);
      }
      if (!aligned && (canonical || !weights.empty())) continue;
      if (strategy == Strategy::kGather) expect("closed form", sums[0], plan::gather_decode_bytes(p, size));
      if (strategy == Strategy::kPaper || strategy == Strategy::kTwoPhase || strategy == Strategy::kMerge) {
        expect("closed form", sums[0], plan::tree_decode_bytes(p, size));
      }
    }
  }
  return failures;
}

}  // namespace treeattn::testing_parallel
