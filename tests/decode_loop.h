// SPDX-License-Identifier: Apache-2.0
// The decoding loop of a model, with random numbers for its queries, keys and values.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "treeattn/parallel_attention.h"

namespace treeattn::testing_parallel {

// A prompt, then one token after the other, each seeing the keys of those before it (published code has lost them).
struct Loop {
  static constexpr std::int64_t kPrompt = 300, kSteps = 60, kHeads = 6, kKvHeads = 2, kDim = 32;
  std::vector<float> q, k, v;

  Loop() : q(kSteps * kHeads * kDim), k((kPrompt + kSteps) * kKvHeads * kDim), v(k.size()) {
    std::uint32_t state = 1;
    const auto fill = [&](std::vector<float>& values) {
      for (float& x : values) {
        state = state * 1664525u + 1013904223u;
        x = static_cast<float>(state >> 8) / 8388608.0f - 1.0f;
      }
    };
    fill(q);
    fill(k);
    fill(v);
  }

  KvCacheConfig config() const { return {1, kKvHeads, kDim, kDim, DType::kBFloat16, DType::kBFloat16, {64, 16}}; }
  void append(KvCache& cache, SequenceId id, std::int64_t first, std::int64_t count) const {
    const auto view = [&](const std::vector<float>& values) {
      return KvView::tokens_first(values.data() + first * kKvHeads * kDim, DType::kFloat32, 1, count, kKvHeads, kDim);
    };
    cache.append(id, view(k), view(v));
  }
  void write(KvCache& cache, const TokenRange& range) const {
    const auto view = [&](const std::vector<float>& values) {
      return KvView::tokens_first(values.data() + range.first * kKvHeads * kDim, DType::kFloat32, 1, range.count,
                                  kKvHeads, kDim);
    };
    cache.write(range.sequence, 0, range.first, view(k), view(v));
  }
  std::vector<float> decode(ParallelAttention& attention, const KvCache& cache, SequenceId id, std::int64_t step,
                            ThreadPool& pool) const {
    std::vector<float> out(kHeads * kDim);
    AttentionOptions options;
    options.causal = true;
    attention.decode(cache, 0, {&id, 1},
                     QueryView::dense(q.data() + step * kHeads * kDim, DType::kFloat32, 1, 1, kHeads, kDim), options,
                     out, {}, pool);
    return out;
  }
  // The step whose keys were appended last. Survivors of a loss may have been a step apart; the cache is at the
  // earliest.
  static std::int64_t last_step(const KvCache& cache, SequenceId id) { return cache.length(id) - kPrompt - 1; }

  // All steps on one rank.
  std::vector<std::vector<float>> undisturbed(int gpu = KvCache::kHost) const {
    std::vector<std::vector<float>> outs;
    KvCache cache(self_communicator(), config(), {}, gpu);
    ParallelAttention attention(cache.communicator());
    ThreadPool pool(1);
    const SequenceId id = cache.add_sequence();
    append(cache, id, 0, kPrompt);
    for (std::int64_t step = 0; step < kSteps; ++step) {
      append(cache, id, kPrompt + step, 1);
      outs.push_back(decode(attention, cache, id, step, pool));
    }
    return outs;
  }
};

}  // namespace treeattn::testing_parallel
