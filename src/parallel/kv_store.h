// SPDX-License-Identifier: Apache-2.0
// One rank's part of a sharded KV cache: what KvCache is made of, and what the attention calls read.
//
// A page holds one chunk of one sequence (in every layer at the same place), so growth never copies and a branch moves
// page by page.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "parallel/kv_pool.h"
#include "parallel/page_window.h"
#include "plan/shares.h"
#include "treeattn/kv_cache.h"
#include "treeattn/parallel_attention.h"
#include "treeattn/views.h"

namespace treeattn::parallel {

// In place of a page where another rank carries the chunk.
inline constexpr std::int32_t kNoPage = -1;

// K and V of some sequences on this rank, ready for the kernels: paged views whose page is a chunk and whose table has
// an entry for every chunk of the sequence, or kNoPage. Owns the table; views memory of the cache, and is valid until
// the cache is next changed. Move it, do not copy it: the views point into the table.
struct KvBatch {
  KvView k;
  KvView v;
  kernels::cuda::RankDevice* device = nullptr;  // the GPU that K and V are on; null: the host's memory
  std::vector<std::int64_t> lengths;            // [batch] tokens of the whole sequence
  std::vector<std::int32_t> table;              // [batch, chunks of the longest]
};

// One chunk of a leaf. Chunks of forks may share a page: the pages of a leaf are numbered in the order of first use.
struct LeafChunk {
  SequenceId sequence = 0;
  std::int64_t chunk = 0;
  std::int64_t tokens = 0;      // in use
  std::int32_t page = kNoPage;  // number within the leaf

  bool operator==(const LeafChunk&) const = default;
};

// Tokens in use of each page of a leaf: the most that any of its chunks uses. Throws Error when the numbers are not
// 0, 1, 2 ... by first use, or when one page stands for different chunks of the sequence.
std::vector<std::int64_t> tokens_of_pages(std::span<const LeafChunk> chunks);

// Adds [first, first + count), joined to the last range where they touch.
void append_range(std::vector<TokenRange>& ranges, SequenceId sequence, std::int64_t first, std::int64_t count);

TokenBytes token_bytes(const KvCacheConfig& config);
// Throws InvalidArgument, naming the value and what is accepted.
void check_config(const KvCacheConfig& config);
// Which rank carries what, node by node. Throws InvalidArgument.
plan::Shares make_shares(const Communicator& communicator, const KvCacheConfig& config,
                         std::span<const double> weights);

// The calls that KvCache has too are documented there.
class KvStore {
 public:
  static constexpr std::int64_t kMaxTokens = std::int64_t{1} << 60;
  static constexpr SequenceId kMaxSequences = SequenceId{1} << 60;

  // Checks the config. Requires shares of config.order.branches leaves over the ranks of the communicator.
  // gpu: where the pages lie; negative: in the host's memory.
  KvStore(std::shared_ptr<Communicator> communicator, const KvCacheConfig& config, plan::Shares shares,
          int gpu = KvCache::kHost);

  const KvCacheConfig& config() const { return config_; }
  const std::shared_ptr<Communicator>& communicator() const { return communicator_; }
  const plan::Shares& shares() const { return shares_; }
  // Null where the pages are in the host's memory.
  kernels::cuda::RankDevice* device() const { return pool_->backend().device(); }

  SequenceId add_sequence();
  SequenceId fork(SequenceId sequence);
  void truncate(SequenceId sequence, std::int64_t length);
  void drop(SequenceId sequence);
  std::int64_t length(SequenceId sequence) const { return find(sequence).length; }
  // Throws Error where this rank has refused tokens that others may have taken, until it is truncated.
  void require_agreed(SequenceId sequence) const;
  std::vector<SequenceId> sequences() const;
  SequenceId next_sequence() const { return next_; }

  void append(SequenceId sequence, const KvView& k, const KvView& v);
  void extend(SequenceId sequence, std::int64_t tokens);
  void write(SequenceId sequence, int layer, std::int64_t first, const KvView& k, const KvView& v);
  void append_from_device(SequenceId sequence, const KvView& k, const KvView& v, void* stream);
  void write_from_device(SequenceId sequence, int layer, std::int64_t first, const KvView& k, const KvView& v,
                         void* stream);
  void unshare(SequenceId sequence, std::int64_t first, std::int64_t count);

  std::vector<TokenRange> carried(SequenceId sequence, std::int64_t first, std::int64_t count) const;
  std::int64_t carried_tokens(SequenceId sequence) const;
  std::size_t allocated_bytes() const { return pool_->used_bytes(); }
  // Of the GPU that the pages are on, for K and V of other ranks.
  std::size_t workspace_bytes() const {
    return pool_->backend().workspace_bytes() + (page_window_ && *page_window_ ? PageWindow::kBytes : 0);
  }

  // For the kernels. `pages` of the views are those the arrays hold, in use or not.
  KvBatch batch(int layer, std::span<const SequenceId> sequences) const;
  // Requires that this rank carries the chunk. Not to be written to: a fork may share it. Addresses of the memory that
  // the pages are in, which may be a GPU's.
  ChunkMemory chunk(int layer, SequenceId sequence, std::int64_t chunk) const;

  // Whether all ranks have the same sequences, shares and kernels: found out by the first attention call.
  bool same_on_ranks() const { return same_on_ranks_; }
  void found_same_on_ranks() const { same_on_ranks_ = true; }

  // Collective. How pages of other ranks come to this one's GPU; null: by messages. Kept from call to call.
  PageWindow* page_window() const;
  // Collective. How states go best from GPU to GPU (choose_link.h). Kept from call to call.
  DeviceLink fastest_link() const;

  // Keeps the memory of all chunks alive while messages that are given up may still read it.
  std::shared_ptr<const void> memory() const { return pool_; }

  // Collective. Bring the leaves to where the new shares want them (kv_rebalance.cc). LostRanks leaves every leaf whole
  // with the rank that had it or with the one it was going to, so that adopt() can go on from there.
  void rebalance(plan::Shares shares);
  std::vector<TokenRange> adopt(std::shared_ptr<Communicator> survivors, plan::Shares shares);

  // Leaf by leaf, for moving and for files (kv_leaves.cc).
  // Every chunk of a leaf, by sequence, then by chunk: the same on every rank but for the pages.
  std::vector<LeafChunk> leaf_chunks(int leaf) const;
  // Of chunks as leaf_chunks gave them: the page of the pool behind each number.
  std::vector<std::int32_t> pool_pages(std::span<const LeafChunk> chunks) const;
  // Whether this rank has the content of every chunk of the leaf; so it has where there is none.
  bool holds(int leaf) const;
  // Gives the chunks these pages of the pool, one per number, and takes those over. Requires that they have none.
  void place(std::span<const LeafChunk> chunks, std::span<const std::int32_t> pages);
  void release_leaf(int leaf);
  // A sequence as a file describes it: no chunk has a page yet. Requires ids in ascending order.
  void restore(SequenceId sequence, std::int64_t length);
  void restore_next(SequenceId next) { next_ = next; }
  // Of the save that this was read from (kv_files.h); 0: of none.
  void restore_generation(std::uint64_t generation) { generation_ = generation; }
  std::uint64_t generation() const { return generation_; }
  KvPool& pool() { return *pool_; }
  const KvPool& pool() const { return *pool_; }

 private:
  struct Sequence {
    std::int64_t length = 0;
    std::vector<std::int32_t> pages;  // [chunks] of the pool
    bool refused = false;             // tokens that other ranks may have taken
  };

  const Sequence& find(SequenceId sequence) const;
  Sequence& find(SequenceId sequence);
  std::int64_t chunk_count(std::int64_t tokens) const;
  std::int64_t chunk_use(const Sequence& sequence, std::int64_t chunk) const;
  bool carries(std::int64_t chunk) const;
  bool among_others() const { return communicator_->size() > 1; }
  std::int64_t carried_chunks(std::int64_t first, std::int64_t last) const;
  void check_layer(int layer) const;
  void check_write(const KvView& k, const KvView& v) const;
  void check_device(const char* call) const;
  // Stores what this rank carries: rows(source, first token of the source, tokens, type, where to, where its scales
  // go), for K and for V.
  template <class StoreRows>
  void store(SequenceId sequence, int layer, std::int64_t first, const KvView& k, const KvView& v,
             const StoreRows& rows);
  template <class Write>
  void append_by(SequenceId sequence, const KvView& k, const KvView& v, const Write& write);
  void unshare(Sequence& sequence, std::int64_t chunk);
  void cut(Sequence& sequence, std::int64_t chunks) noexcept;
  void cut_to_common(Communicator& communicator);
  std::vector<TokenRange> redistribute(Communicator& communicator, plan::Shares shares, bool all_must_be_there);
  std::vector<TokenRange> make_room_for(std::span<const int> leaves);

  std::shared_ptr<Communicator> communicator_;
  KvCacheConfig config_;
  plan::Shares shares_;
  std::shared_ptr<KvPool> pool_;
  std::map<SequenceId, Sequence> sequences_;
  SequenceId next_ = 0;
  std::uint64_t generation_ = 0;
  mutable bool same_on_ranks_ = false;
  // None: not asked for yet.
  mutable std::optional<std::unique_ptr<PageWindow>> page_window_;
  mutable std::optional<DeviceLink> fastest_link_;
};

}  // namespace treeattn::parallel
