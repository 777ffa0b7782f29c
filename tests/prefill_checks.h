// SPDX-License-Identifier: Apache-2.0
// What must hold of prefill over a sharded cache: as parallel_checks.h, whatever carries the bytes.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "parallel_checks.h"

namespace treeattn::testing_parallel {

// The queries of one rank, and what prefill makes of them.
struct PrefillShare {
  // Those of the last shape.queries tokens that the cache's rank carries.
  PrefillShare(const PreparedCase& prepared, const KvCache& cache, SequenceId id)
      : first(prepared.data.length(0) - prepared.data.shape().queries),
        ranges(cache.carried(id, first, prepared.data.shape().queries)) {
    const QueryView all = prepared.data.input().q;
    const auto token_bytes = all.query_stride * static_cast<std::int64_t>(dtype_size(all.dtype));
    for (const TokenRange& range : ranges) {
      const std::byte* from = static_cast<const std::byte*>(all.data) + (range.first - first) * token_bytes;
      q.insert(q.end(), from, from + range.count * token_bytes);
      tokens += range.count;
    }
  }
  // data: q, wherever it lies.
  QueryView queries(const PreparedCase& prepared, const void* data) const {
    const kernels::Case& shape = prepared.data.shape();
    return QueryView::dense(data, shape.q_type, 1, tokens, shape.heads, shape.head_dim);
  }

  std::int64_t first;
  std::vector<TokenRange> ranges;
  std::vector<std::byte> q;
  std::int64_t tokens = 0;
  Output output;
};

inline PrefillShare prefill_on(const std::shared_ptr<Communicator>& world, const PreparedCase& prepared,
                               std::span<const double> weights, bool collect, ThreadPool& pool,
                               const GpuOf& gpu_of = on_host) {
  const kernels::Case& shape = prepared.data.shape();
  KvCache cache(world, prepared.config(), weights, gpu_of(world->rank()));
  const SequenceId id = prepared.fill(cache).front();
  PrefillShare share(prepared, cache, id);
  share.output.out.resize(static_cast<std::size_t>(share.tokens * shape.heads * shape.v_dim));
  share.output.lse.resize(static_cast<std::size_t>(share.tokens * shape.heads));
  ParallelAttention attention(world);
  attention.prefill(cache, 0, id, share.first, shape.queries, share.queries(prepared, share.q.data()),
                    prepared.data.options(), share.output.out, share.output.lse, pool, collect);
  return share;
}

// A prefill of the last shape.queries tokens, and its result on one rank, which must be right. Requires dense
// queries.
struct PreparedPrefill {
  explicit PreparedPrefill(const kernels::Case& shape, int gpu = KvCache::kHost) : prepared(shape, 11, gpu) {
    ThreadPool pool(1);
    one = prefill_on(self_communicator(), prepared, {}, false, pool, [&](int) { return gpu; }).output;
  }
  double error() const { return prepared.error(one, Strategy::kRing); }

  PreparedCase prepared;
  Output one;
};

// By ring and by collecting K and V: the bits of one rank.
inline Failures check_prefill(const std::shared_ptr<Communicator>& world, const PreparedPrefill& prefill,
                              std::span<const double> weights = {}, const GpuOf& gpu_of = on_host) {
  Failures failures;
  ThreadPool pool(1 + world->rank() % 2);
  const kernels::Case& shape = prefill.prepared.data.shape();
  for (const bool collect : {false, true}) {
    const PrefillShare got = prefill_on(world, prefill.prepared, weights, collect, pool, gpu_of);
    Output want;
    for (const TokenRange& range : got.ranges) {
      const std::int64_t begin = (range.first - got.first) * shape.heads, count = range.count * shape.heads;
      want.out.insert(want.out.end(), prefill.one.out.begin() + begin * shape.v_dim,
                      prefill.one.out.begin() + (begin + count) * shape.v_dim);
      want.lse.insert(want.lse.end(), prefill.one.lse.begin() + begin, prefill.one.lse.begin() + begin + count);
    }
    if (got.output.same_bits_as(want)) continue;
    failures.push_back(
        fmt::format("{} on {} ranks{}: other bits", shape.name, world->size(), collect ? ", collected" : ""));
  }
  return failures;
}

// Prefills that have something particular.
inline std::vector<kernels::Case> prefill_cases() {
  kernels::Case shape;
  shape.name = "prefill";
  shape.tokens = 700;
  shape.queries = 611;
  shape.causal = true;
  shape.order = {64, 16};
  std::vector<kernels::Case> cases = {shape};
  shape.name = "prefill, contiguous, window, sinks, bfloat16 cache";
  shape.order = {64, 8, Placement::kContiguous, 128};
  shape.window = 100;
  shape.sinks = true;
  shape.k_type = shape.v_type = DType::kBFloat16;
  cases.push_back(shape);
  shape.name = "prefill, int8 cache, alibi";
  shape.window = 0;
  shape.alibi = true;
  shape.k_type = shape.v_type = DType::kInt8;
  cases.push_back(shape);
  shape = cases.front();
  shape.name = "prefill, bfloat16 throughout";
  shape.q_type = shape.k_type = shape.v_type = DType::kBFloat16;
  shape.order = {256, 4};
  shape.head_dim = shape.v_dim = 128;
  cases.push_back(shape);
  shape.name = "prefill, float16 throughout, window, sinks";
  shape.q_type = shape.k_type = shape.v_type = DType::kFloat16;
  shape.order = {64, 16};
  shape.head_dim = shape.v_dim = 64;
  shape.window = 150;
  shape.sinks = true;
  cases.push_back(shape);
  shape = cases.front();
  shape.name = "prefill, bfloat16 queries, int8 cache";
  shape.q_type = DType::kBFloat16;
  shape.k_type = shape.v_type = DType::kInt8;
  shape.head_dim = shape.v_dim = 128;
  cases.push_back(shape);
  shape.name = "prefill, bfloat16 queries, fp8 cache, window";
  shape.k_type = shape.v_type = DType::kFp8E4M3;
  shape.fp8_scales = true;
  shape.order = {64, 8, Placement::kContiguous, 128};
  shape.head_dim = shape.v_dim = 64;
  shape.window = 150;
  cases.push_back(shape);
  return cases;
}

}  // namespace treeattn::testing_parallel
