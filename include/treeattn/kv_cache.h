// SPDX-License-Identifier: Apache-2.0
// A KV cache whose sequences are spread over the ranks of a communicator. Each rank holds the chunks of the branches it
// carries, in pages, and nothing else.
//
//   treeattn::KvCache cache(world, {.kv_heads = 8, .k_dim = 128, .v_dim = 128});       // bfloat16 unless said
//   const treeattn::SequenceId sequence = cache.add_sequence();
//   cache.append(sequence, k, v);           // the same call on every rank; each keeps its share
//
// Every rank makes the same calls with the same arguments in the same order, except write(). Nothing here communicates
// but rebalance, adopt, save and load.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <vector>

#include "treeattn/communicator.h"
#include "treeattn/order.h"
#include "treeattn/thread_pool.h"
#include "treeattn/views.h"

namespace treeattn {

namespace parallel {
class KvStore;
}

using SequenceId = std::int64_t;

struct KvCacheConfig {
  int layers = 1;
  std::int64_t kv_heads = 0;
  std::int64_t k_dim = 0;
  std::int64_t v_dim = 0;
  DType k_type = DType::kBFloat16;  // int8 and fp8 keep a scale per row of a head
  DType v_type = DType::kBFloat16;
  ReductionOrder order{};

  bool operator==(const KvCacheConfig&) const = default;
};

// Consecutive tokens of a sequence.
struct TokenRange {
  SequenceId sequence = 0;
  std::int64_t first = 0;  // global position
  std::int64_t count = 0;

  bool operator==(const TokenRange&) const = default;
};

// Not thread-safe. One that was moved from may be assigned to and destroyed, nothing else. Holds the communicator, and
// copies what is written to it. Calls throw InvalidArgument, before anything has changed, for a sequence, layer, length
// or view that they do not take.
class KvCache {
 public:
  static constexpr int kHost = -1;

  // weights: how much each rank carries relative to the others; 0 means nothing. Empty: equal shares. Branches go to
  // the ranks node by node, so that a node holds one piece of the tree.
  // gpu: where this rank's pages lie, kHost or the index of a GPU; the attention calls then compute there. Ranks may
  // differ in it, and may share a GPU, each with a stream of its own. Throws InvalidArgument, Unavailable where there
  // is no such GPU.
  KvCache(std::shared_ptr<Communicator> communicator, const KvCacheConfig& config, std::span<const double> weights = {},
          int gpu = kHost);
  ~KvCache();
  KvCache(KvCache&&) noexcept;
  KvCache& operator=(KvCache&&) noexcept;

  const KvCacheConfig& config() const;
  const std::shared_ptr<Communicator>& communicator() const;
  int gpu() const;

  // Sequences. Ids are 0, 1, 2 ... and are not used again.
  SequenceId add_sequence();
  // A copy that shares all pages; a page is copied when one of the two first writes to it.
  SequenceId fork(SequenceId sequence);
  // Forgets the tokens from position `length` on. Requires 0 <= length <= the current one.
  void truncate(SequenceId sequence, std::int64_t length);
  void drop(SequenceId sequence);
  std::int64_t length(SequenceId sequence) const;
  std::vector<SequenceId> sequences() const;

  // Adds k.tokens tokens at the end. k and v [1, tokens, kv_heads, dim] in the type of the cache (with scales where it
  // has them), or in float32, float16 or bfloat16, which is then converted; int8 and fp8 get the scale max|x| / 127 and
  // max|x| / 448 of each row, a row of zeros the scale 2^-126. NaN and infinities show: an int8 row with one gets the
  // scale NaN, in fp8 the element becomes NaN. Copies what this rank carries. Requires layers == 1.
  void append(SequenceId sequence, const KvView& k, const KvView& v);
  // With several layers: first the room, whose content is undefined until written, then each layer. Throws Error when
  // this rank has no addresses left for it, std::bad_alloc; the cache is then as it was. So does append. Other ranks
  // may have taken the tokens all the same: until truncate() has been called for the sequence, to one length on every
  // rank, attention to it throws Error here, and the others hear of a rank that does not answer.
  void extend(SequenceId sequence, std::int64_t tokens);
  // Stores those of the k.tokens tokens from position `first` on that this rank carries; they must exist. A rank may
  // leave out calls whose tokens it does not carry.
  void write(SequenceId sequence, int layer, std::int64_t first, const KvView& k, const KvView& v);
  // The same with the rows and scales of k and v in memory of this rank's GPU (page tables stay in the host's), bit for
  // bit, as work on `stream`, a cudaStream_t: it reads what is put there before, and what is put there later may
  // overwrite k and v. The rows are converted on the GPU; nothing waits. Throws InvalidArgument where gpu() is kHost.
  void append_from_device(SequenceId sequence, const KvView& k, const KvView& v, void* stream);
  void write_from_device(SequenceId sequence, int layer, std::int64_t first, const KvView& k, const KvView& v,
                         void* stream);
  // Pages of this rank that hold tokens of [first, first + count) are no longer shared with forks: for kernels of this
  // library that write where the page tables say.
  void unshare(SequenceId sequence, std::int64_t first, std::int64_t count);

  // The tokens of [first, first + count) that this rank carries, ascending, neighbours joined.
  std::vector<TokenRange> carried(SequenceId sequence, std::int64_t first, std::int64_t count) const;
  // Tokens of a sequence that this rank carries; bytes of K, V and scales that it has allocated for all sequences.
  std::int64_t carried_tokens(SequenceId sequence) const;
  std::size_t allocated_bytes() const;
  // Which rank carries a branch, by the branch's place among the leaves of the tree.
  std::span<const int> rank_of_leaf() const;

  // Collective. Moves branches so that the shares follow the new weights. The next result has the same bits.
  void rebalance(std::span<const double> weights);
  // Collective over `survivors`, a communicator that Communicator::shrink made of this cache's (or of one like it).
  // Takes it over, spreads the branches by the weights (empty: equal) and returns what this rank now carries and has no
  // content for, because the rank that had it is gone: zeros, to be filled by write() before the next collective call.
  // Survivors of a loss may be some calls apart, as decode does not wait for a rank that carries nothing: sequences are
  // cut to the shortest length that one of them has, and those that one of them lacks are dropped. length() says where
  // to go on. (Only lengths are compared: between a truncate and an append that puts other tokens in the place of those
  // cut off, let there be a barrier(). What write() put over tokens that were there, since the last barrier(), may be
  // there on some ranks only: write it again.)
  // Throws InvalidArgument on every rank where their weights differ; the cache is then as it was.
  std::vector<TokenRange> adopt(std::shared_ptr<Communicator> survivors, std::span<const double> weights = {});

  // Collective. One file per branch and a manifest, each checksummed, written beside and renamed: a save that fails or
  // is cut off leaves an earlier one in the same directory as it was. Files of other names (docs/architecture.md has
  // those of a save) stay there as they are. All ranks must see the directory. Groups that save into the same one do so
  // one after the other, where the file system has locks (flock). Throws on every rank: BadFile, also when another
  // group still writes there after a minute; Unavailable where one of them has too little memory.
  void save(const std::filesystem::path& directory) const;
  // Collective. Any number of ranks, also while another group saves there. Throws on every rank: BadFile,
  // naming file and reason; InvalidArgument; Unavailable where one of them has no such GPU or too little memory.
  static KvCache load(std::shared_ptr<Communicator> communicator, const std::filesystem::path& directory,
                      std::span<const double> weights = {}, int gpu = kHost);

  // For the attention calls of this library. The cache's own.
  const parallel::KvStore& store() const { return *store_; }

 private:
  explicit KvCache(std::unique_ptr<parallel::KvStore> store);
  std::unique_ptr<parallel::KvStore> store_;
};

// Collective. Weights by which every rank needs as long as the others to read what it carries: the bandwidth of reading
// its memory, GB/s, measured on all ranks at the same time, on 512 MiB each. gpu: where this rank's pages will lie, as
// in KvCache; the pool is the one it will decode with. A cache on CPUs and GPUs together needs canonical = false in
// ParallelOptions. Throws InvalidArgument, Unavailable where there is no such GPU, LostRanks.
std::vector<double> bandwidth_weights(Communicator& communicator, int gpu, ThreadPool& pool);

}  // namespace treeattn
