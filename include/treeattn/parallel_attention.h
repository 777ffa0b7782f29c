// SPDX-License-Identifier: Apache-2.0
// Attention over a sharded KV cache: Tree Attention with several ways to reduce, and Ring Attention beside it.
//
//   treeattn::ParallelAttention attention(world, {.strategy = treeattn::Strategy::kMerge});
//   attention.decode(cache, layer, {&sequence, 1}, q, {}, out, lse, pool);      // on every rank
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "treeattn/attention.h"
#include "treeattn/communicator.h"
#include "treeattn/kv_cache.h"
#include "treeattn/strategy.h"

namespace treeattn {

// How the states of ranks on GPUs travel in decode.
enum class DeviceLink : std::uint8_t {
  kHost,  // by way of the host and the communicator, whatever that is
  kNccl,  // from GPU to GPU by NCCL, which wants a GPU for every rank, or is 2.30 or later and told to let them share
  kPeer,  // one kernel in which every rank writes into the memory of all others: ranks on one machine, as threads or
          // processes. Always in the canonical order. Several ranks may share a GPU.
  kAuto,  // with strategy kAuto: kPeer where every rank has a GPU of its own in one machine and reaches the others', or
          // all are threads with one GPU. Else kHost. Found out by the first call with a cache
};
// Whether this build has NCCL.
bool nccl_available();

struct ParallelOptions {
  Strategy strategy = Strategy::kAuto;
  // true: the bits of one machine, which needs the same instruction set on all ranks, or GPUs of one compute capability
  // (checked by the first call). false: every rank first merges what it carries into one state. Less to send where the
  // shares do not fall on nodes of the tree; the bits then depend on the shares.
  bool canonical = true;
  // kNccl, kPeer: all ranks must have their pages on a GPU, and with one ParallelAttention always on the same. What
  // NCCL sends is not in the report's traffic. Results by heads go by way of the host all the same, as do the states of
  // the ring; its pages go from GPU to GPU where they can.
  DeviceLink link = DeviceLink::kAuto;
};

// Where the result of decode goes.
enum class Result : std::uint8_t {
  kReplicated,  // every rank gets all heads
  kByHeads,     // rank r gets heads [r * heads / size, (r + 1) * heads / size), and sends half as much; not with kRing
};

// What the last call did, on this rank.
struct CallReport {
  Strategy strategy = Strategy::kAuto;  // the one that ran
  double local_seconds = 0;             // attention to what this rank carries
  double reduce_seconds = 0;            // the rest, waiting for others included
  Traffic traffic;                      // of this call alone
};

// Holds what does not change from call to call: schedules, message buffers, the measured links. Not thread-safe: two
// threads that decode at once need a communicator (not one that was split from the other's), a cache and one of these
// each; with MPI, one thread at a time decodes. One per rank; every rank makes the same calls with the same arguments
// (out and lse apart), as every call is collective. Throws LostRanks, and InvalidArgument before anything is sent. The
// first call with a cache also throws that, on every rank, where options, nodes, sequences or weights of the ranks
// differ; later calls do not ask again.
class ParallelAttention {
 public:
  explicit ParallelAttention(std::shared_ptr<Communicator> communicator, ParallelOptions options = {});
  ~ParallelAttention();

  // q [sequences.size(), queries, heads, k_dim], the same on every rank; the queries are the last tokens of each
  // sequence (append their keys first), or stand at first_query. out [batch, queries, heads, v_dim] (or this rank's
  // heads), lse [batch, queries, heads] or empty.
  void decode(const KvCache& cache, int layer, std::span<const SequenceId> sequences, const QueryView& q,
              const AttentionOptions& options, std::span<float> out, std::span<float> lse, ThreadPool& pool,
              Result result = Result::kReplicated, std::span<const std::int64_t> first_query = {});

  // The same with q and out in memory of this rank's GPU and no lse, as work on `stream`, a cudaStream_t: it reads what
  // is put there before, and what is put there later finds out. The host does not wait for the GPU, so that what is in
  // out counts when confirm() has returned. Returns false, on every rank and with nothing done, where states do not
  // stay on GPUs: they do with link = kPeer, or kAuto where it stands for that, no sinks, and any strategy but kRing.
  bool decode_on_device(const KvCache& cache, int layer, std::span<const SequenceId> sequences, const QueryView& q,
                        const AttentionOptions& options, float* out, void* stream, ThreadPool& pool);
  // Once the host has waited for that stream: throws LostRanks where a rank's states did not come in time. What was put
  // on the stream since is then worthless. The next decode_on_device throws it as well.
  void confirm();

  // Many queries, each rank with its own: q [1, tokens, heads, k_dim] for the tokens of [first, first + count) that
  // this rank carries (KvCache::carried), in that order; out and lse in the same order. A rank that carries none of
  // them says the same of q but for queries = 0 and the data, which may be null. Keys are those of the cache, so
  // append before. By Ring Attention: K and V go round in pieces while the last piece is worked on. Cyclic placement
  // makes a causal mask cost every rank the same. gather_kv: every rank first collects all of K and V, where memory
  // allows: one exchange, and no waiting after that.
  void prefill(const KvCache& cache, int layer, SequenceId sequence, std::int64_t first, std::int64_t count,
               const QueryView& q, const AttentionOptions& options, std::span<float> out, std::span<float> lse,
               ThreadPool& pool, bool gather_kv = false);

  // The same with q and out in memory of this rank's GPU and no lse, as work on `stream`, a cudaStream_t. Every rank
  // first collects all of K and V on its GPU. Requires a cache on a GPU.
  void prefill_on_device(const KvCache& cache, int layer, SequenceId sequence, std::int64_t first, std::int64_t count,
                         const QueryView& q, const AttentionOptions& options, float* out, void* stream);

  const CallReport& report() const;
  // Why kAuto took what it took, as a table: the links measured, and steps, bytes and time of each strategy.
  std::string why() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace treeattn
