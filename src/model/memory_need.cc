// SPDX-License-Identifier: Apache-2.0
#include "model/memory_need.h"

#include <algorithm>
#include <vector>

#include "base/bisect.h"
#include "base/counting.h"
#include "model/activations.h"
#include "model/weights.h"
#include "parallel/kv_store.h"
#include "parallel/ring_pass.h"
#include "plan/shares.h"
#include "plan/tree_order.h"
#include "treeattn/kv_cache.h"
#include "treeattn/state.h"

namespace treeattn::model {
namespace {

// Chunks [0, chunks) that the fullest rank carries.
std::int64_t most_chunks(const ReductionOrder& order, std::int64_t chunks, int ranks) {
  const plan::Shares shares = plan::Shares::weighted(order.branches, base::counting(ranks), {});
  std::vector<std::int64_t> of_rank(static_cast<std::size_t>(ranks), 0);
  for (int leaf = 0; leaf < order.branches; ++leaf) {
    of_rank[static_cast<std::size_t>(shares.rank_of(leaf))] += plan::chunks_of_leaf(order, leaf, 0, chunks - 1);
  }
  return *std::max_element(of_rank.begin(), of_rank.end());
}

}  // namespace

MemoryNeed memory_need(const LlamaConfig& c, const LlamaOptions& options, WeightFormat format, std::int64_t tokens,
                       int ranks) {
  const ReductionOrder& order = options.order;
  const KvCacheConfig cache{1, c.kv_heads, c.head_dim, c.head_dim, options.kv_type, options.kv_type, order};
  const std::size_t chunk_bytes = static_cast<std::size_t>(order.chunk_tokens) * parallel::token_bytes(cache).all();
  const std::int64_t chunks = plan::chunk_count(order, tokens);
  const std::int64_t piece = std::min<std::int64_t>(chunks, std::int64_t{options.chunks_per_piece} * ranks);
  const auto share = static_cast<std::size_t>(most_chunks(order, chunks, ranks));
  // The last chunk need not be full.
  const std::int64_t rows = std::min(tokens, most_chunks(order, piece, ranks) * order.chunk_tokens);

  MemoryNeed need;
  need.weights = all_weight_bytes(c, format);
  need.cache = share * chunk_bytes * static_cast<std::size_t>(c.layers);
  const auto host_copies = static_cast<std::size_t>(rows * 2 * (c.heads + c.kv_heads) * c.head_dim) * sizeof(float);
  need.activations = Activations::bytes(c, rows) + host_copies + static_cast<std::size_t>(c.vocab) * 2 * sizeof(float);
  // Of every row a state for each node that waits for its sibling: one on each level at most.
  const auto levels = static_cast<std::size_t>(plan::log2_exact(order.branches)) + 1;
  const std::size_t states =
      static_cast<std::size_t>(rows * c.heads) * state_floats(c.head_dim) * sizeof(float) * levels;
  const std::size_t travelling = ranks == 1          ? 0
                                 : options.gather_kv ? static_cast<std::size_t>(chunks)
                                                     : share + share / parallel::kPiecesPerShare + 1;
  need.passing = travelling * chunk_bytes + states;
  return need;
}

int ranks_needed(const LlamaConfig& config, const LlamaOptions& options, WeightFormat format, std::int64_t tokens,
                 std::size_t machine_bytes) {
  const auto fits = [&](int ranks) {
    const MemoryNeed need = memory_need(config, options, format, tokens, ranks);
    return need.weights + need.of_rank() <= machine_bytes;
  };
  // Branches may be thousands. A power of two has even shares, so where it is too few, all below it are.
  int enough = 1;
  for (; !fits(enough); enough *= 2) {
    if (enough >= options.order.branches) return 0;
  }
  return base::bisect(enough, enough / 2, fits);
}

}  // namespace treeattn::model
