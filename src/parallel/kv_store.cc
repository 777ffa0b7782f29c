// SPDX-License-Identifier: Apache-2.0
#include "parallel/kv_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "kernels/head_dims.h"
#include "kernels/problem.h"
#include "parallel/choose_link.h"
#include "parallel/kv_rows.h"
#include "plan/tree_order.h"

namespace treeattn::parallel {
namespace {

using base::require;

const KvCacheConfig& checked(const KvCacheConfig& config) {
  check_config(config);
  return config;
}

// Collective the first time. To find out is no part of what a call sends.
template <class T, class Find>
const T& found_once(Communicator& communicator, std::optional<T>& kept, const Find& find) {
  if (!kept) {
    const Traffic before = communicator.traffic();
    kept = find();
    communicator.reset_traffic(before);
  }
  return *kept;
}

int ranks_of_process(const std::shared_ptr<Communicator>& communicator) {
  return communicator != nullptr && communicator->transport() == "threads" ? communicator->size() : 1;
}

}  // namespace

void append_range(std::vector<TokenRange>& ranges, SequenceId sequence, std::int64_t first, std::int64_t count) {
  const bool touches =
      !ranges.empty() && ranges.back().sequence == sequence && ranges.back().first + ranges.back().count == first;
  if (touches) {
    ranges.back().count += count;
  } else {
    ranges.push_back({sequence, first, count});
  }
}

void check_config(const KvCacheConfig& config) {
  constexpr int kMaxLayers = 1 << 16;
  constexpr std::int64_t kMaxHeads = std::int64_t{1} << 20;
  const auto require_dim = [](const char* name, std::int64_t dim) {
    require(kernels::takes_head_dim(dim), "{} = {}; accepted: {} to {} in steps of {}", name, dim,
            kernels::kLeastHeadDim, kernels::kMostHeadDim, kernels::kHeadDimStep);
  };
  require(config.layers >= 1 && config.layers <= kMaxLayers, "layers = {}; accepted: 1 to {}", config.layers,
          kMaxLayers);
  require(config.kv_heads >= 1 && config.kv_heads <= kMaxHeads, "kv_heads = {}; accepted: 1 to {}", config.kv_heads,
          kMaxHeads);
  require_dim("k_dim", config.k_dim);
  require_dim("v_dim", config.v_dim);
  plan::check_order(config.order);
}

TokenBytes token_bytes(const KvCacheConfig& config) {
  const auto heads = static_cast<std::size_t>(config.kv_heads);
  const auto rows = [&](std::int64_t dim, DType type) {
    return heads * static_cast<std::size_t>(dim) * dtype_size(type);
  };
  const auto scales = [&](DType type) { return kernels::has_scales(type) ? heads * sizeof(float) : 0; };
  return {rows(config.k_dim, config.k_type), rows(config.v_dim, config.v_type), scales(config.k_type),
          scales(config.v_type)};
}

plan::Shares make_shares(const Communicator& communicator, const KvCacheConfig& config,
                         std::span<const double> weights) {
  check_config(config);
  return plan::Shares::weighted(config.order.branches, plan::ranks_by_node(communicator.node_of_rank()), weights);
}

KvStore::KvStore(std::shared_ptr<Communicator> communicator, const KvCacheConfig& config, plan::Shares shares, int gpu)
    : communicator_(std::move(communicator)),
      config_(checked(config)),
      shares_(std::move(shares)),
      pool_(std::make_shared<KvPool>(config.layers, parallel::token_bytes(config), config.order.chunk_tokens,
                                     memory_of(gpu, ranks_of_process(communicator_)))) {
  require(communicator_ != nullptr, "communicator = null; accepted: a group of ranks");
  require(shares_.ranks() == communicator_->size() && shares_.branches() == config_.order.branches,
          "shares of {} leaves over {} ranks; accepted: {} over {}", shares_.branches(), shares_.ranks(),
          config_.order.branches, communicator_->size());
}

PageWindow* KvStore::page_window() const {
  return found_once(*communicator_, page_window_,
                    [&] { return PageWindow::make(*communicator_, pool_->shared_backend()); })
      .get();
}

DeviceLink KvStore::fastest_link() const {
  return found_once(*communicator_, fastest_link_, [&] { return parallel::fastest_link(*communicator_, device()); });
}

const KvStore::Sequence& KvStore::find(SequenceId sequence) const {
  const auto found = sequences_.find(sequence);
  require(found != sequences_.end(), "sequence = {}; accepted: one of the {} that were added and not dropped", sequence,
          sequences_.size());
  return found->second;
}

KvStore::Sequence& KvStore::find(SequenceId sequence) {
  return const_cast<Sequence&>(std::as_const(*this).find(sequence));
}

std::int64_t KvStore::chunk_count(std::int64_t tokens) const { return plan::chunk_count(config_.order, tokens); }

std::int64_t KvStore::chunk_use(const Sequence& sequence, std::int64_t chunk) const {
  return plan::tokens_in_chunk(config_.order, sequence.length, chunk);
}

bool KvStore::carries(std::int64_t chunk) const {
  return shares_.rank_of(plan::leaf_of_chunk(config_.order, chunk)) == communicator_->rank();
}

void KvStore::check_layer(int layer) const {
  require(layer >= 0 && layer < config_.layers, "layer = {}; accepted: 0 to {}", layer, config_.layers - 1);
}

SequenceId KvStore::add_sequence() {
  sequences_.try_emplace(next_);
  return next_++;
}

SequenceId KvStore::fork(SequenceId sequence) {
  const Sequence& copy = sequences_.emplace(next_, find(sequence)).first->second;
  for (const std::int32_t page : copy.pages) {
    if (page != kNoPage) pool_->share(page);
  }
  return next_++;
}

void KvStore::cut(Sequence& sequence, std::int64_t chunks) noexcept {
  for (auto c = static_cast<std::size_t>(chunks); c < sequence.pages.size(); ++c) {
    if (sequence.pages[c] != kNoPage) pool_->release(sequence.pages[c]);
  }
  sequence.pages.resize(static_cast<std::size_t>(chunks));
  pool_->trim();
}

void KvStore::truncate(SequenceId sequence, std::int64_t length) {
  Sequence& found = find(sequence);
  require(length >= 0 && length <= found.length, "length = {}; accepted: 0 to the current one, {}", length,
          found.length);
  cut(found, chunk_count(length));
  found.length = length;
  found.refused = false;
}

void KvStore::drop(SequenceId sequence) {
  cut(find(sequence), 0);
  sequences_.erase(sequence);
}

std::vector<SequenceId> KvStore::sequences() const {
  std::vector<SequenceId> ids;
  for (const auto& [id, sequence] : sequences_) ids.push_back(id);
  return ids;
}

// Of chunks [first, last) those that this rank carries.
std::int64_t KvStore::carried_chunks(std::int64_t first, std::int64_t last) const {
  std::int64_t chunks = 0;
  if (last - first <= config_.order.branches) {  // mostly one, or none
    for (std::int64_t c = first; c < last; ++c) chunks += carries(c) ? 1 : 0;
    return chunks;
  }
  for (const int leaf : shares_.leaves_of(communicator_->rank())) {
    chunks += plan::chunks_of_leaf(config_.order, leaf, first, last - 1);
  }
  return chunks;
}

void KvStore::extend(SequenceId sequence, std::int64_t tokens) {
  Sequence& found = find(sequence);
  require(tokens >= 0 && tokens <= kMaxTokens - found.length, "tokens = {} after {}; accepted: 0 or more, 2^60 in all",
          tokens, found.length);
  const std::size_t before = found.pages.size();
  const auto after = static_cast<std::size_t>(chunk_count(found.length + tokens));
  try {
    pool_->require_addresses(carried_chunks(static_cast<std::int64_t>(before), static_cast<std::int64_t>(after)));
    found.pages.resize(after, kNoPage);
    for (std::size_t c = before; c < after; ++c) {
      if (carries(static_cast<std::int64_t>(c))) found.pages[c] = pool_->take();
    }
  } catch (...) {
    cut(found, static_cast<std::int64_t>(before));
    found.refused = among_others();
    throw;
  }
  found.length += tokens;
}

void KvStore::require_agreed(SequenceId sequence) const {
  if (!find(sequence).refused) return;
  throw Error(
      fmt::format("sequence {} on rank {}, which has refused tokens that other ranks may have taken; accepted: "
                  "after truncate() to one length on every rank",
                  sequence, communicator_->rank()));
}

void KvStore::check_write(const KvView& k, const KvView& v) const {
  check_source("k", k, config_.kv_heads, config_.k_dim, config_.k_type);
  check_source("v", v, config_.kv_heads, config_.v_dim, config_.v_type);
  require(k.tokens == v.tokens, "k.tokens = {} differs from v.tokens = {}; accepted: equal values", k.tokens, v.tokens);
}

void KvStore::check_device(const char* call) const {
  require(device() != nullptr, "{} on rank {}, whose pages are in the host's memory; accepted: a cache on a GPU", call,
          communicator_->rank());
}

template <class Write>
void KvStore::append_by(SequenceId sequence, const KvView& k, const KvView& v, const Write& write) {
  require(config_.layers == 1, "append with layers = {}; accepted: 1, else extend and write each layer",
          config_.layers);
  check_write(k, v);
  // All of them, whoever carries what: lengths must not part where one rank refuses.
  check_pages("k", k, 0, k.tokens);
  check_pages("v", v, 0, v.tokens);
  const std::int64_t before = length(sequence);
  extend(sequence, k.tokens);
  try {
    write(before);
  } catch (...) {
    truncate(sequence, before);
    find(sequence).refused = among_others();
    throw;
  }
}

void KvStore::append(SequenceId sequence, const KvView& k, const KvView& v) {
  append_by(sequence, k, v, [&](std::int64_t before) { write(sequence, 0, before, k, v); });
}

void KvStore::append_from_device(SequenceId sequence, const KvView& k, const KvView& v, void* stream) {
  check_device("append_from_device");
  append_by(sequence, k, v, [&](std::int64_t before) { write_from_device(sequence, 0, before, k, v, stream); });
}

// A page that is shared is copied by who writes first.
void KvStore::unshare(Sequence& sequence, std::int64_t chunk) {
  std::int32_t& page = sequence.pages[static_cast<std::size_t>(chunk)];
  if (!pool_->shared(page)) return;
  const std::int32_t own = pool_->copy(page, chunk_use(sequence, chunk));
  pool_->release(page);
  page = own;
}

void KvStore::unshare(SequenceId sequence, std::int64_t first, std::int64_t count) {
  const std::int64_t chunk_tokens = config_.order.chunk_tokens;
  for (const TokenRange& range : carried(sequence, first, count)) {
    const std::int64_t last = (range.first + range.count - 1) / chunk_tokens;
    for (std::int64_t chunk = range.first / chunk_tokens; chunk <= last; ++chunk) unshare(find(sequence), chunk);
  }
}

template <class StoreRows>
void KvStore::store(SequenceId sequence, int layer, std::int64_t first, const KvView& k, const KvView& v,
                    const StoreRows& rows) {
  Sequence& found = find(sequence);
  check_layer(layer);
  check_write(k, v);
  require(first >= 0 && k.tokens <= found.length - first,
          "first = {} with {} tokens; accepted: those of the sequence, 0 to {}", first, k.tokens, found.length);
  const std::vector<TokenRange> mine = carried(sequence, first, k.tokens);
  for (const TokenRange& range : mine) {
    check_pages("k", k, range.first - first, range.count);
    check_pages("v", v, range.first - first, range.count);
  }
  const std::int64_t chunk_tokens = config_.order.chunk_tokens;
  const TokenBytes bytes = pool_->token_bytes();
  for (const TokenRange& range : mine) {
    for (std::int64_t token = range.first; token < range.first + range.count;) {
      const std::int64_t chunk = token / chunk_tokens;
      const std::int64_t offset = token % chunk_tokens;
      const std::int64_t count = std::min(chunk_tokens - offset, range.first + range.count - token);
      unshare(found, chunk);
      const ChunkMemory memory = pool_->memory(layer, found.pages[static_cast<std::size_t>(chunk)]);
      const auto at = static_cast<std::size_t>(offset);
      const std::int64_t scale_at = offset * config_.kv_heads;
      rows(k, token - first, count, config_.k_type, memory.k + at * bytes.k,
           memory.k_scales == nullptr ? nullptr : memory.k_scales + scale_at);
      rows(v, token - first, count, config_.v_type, memory.v + at * bytes.v,
           memory.v_scales == nullptr ? nullptr : memory.v_scales + scale_at);
      token += count;
    }
  }
}

void KvStore::write(SequenceId sequence, int layer, std::int64_t first, const KvView& k, const KvView& v) {
  if (device() == nullptr) return store(sequence, layer, first, k, v, store_rows);
  // Converted here, then copied: what the host has it need not send wider than it is kept.
  KvMemory& memory = pool_->backend();
  std::vector<std::byte> staged;
  std::vector<float> staged_scales;
  store(sequence, layer, first, k, v,
        [&](const KvView& source, std::int64_t token, std::int64_t count, DType type, std::byte* rows, float* scales) {
          const auto elements = static_cast<std::size_t>(count * source.kv_heads * source.head_dim);
          staged.resize(elements * dtype_size(type));
          staged_scales.resize(scales == nullptr ? 0 : static_cast<std::size_t>(count * source.kv_heads));
          store_rows(source, token, count, type, staged.data(), staged_scales.data());
          memory.copy_in(rows, staged.data(), staged.size());
          if (scales != nullptr) {
            memory.copy_in(reinterpret_cast<std::byte*>(scales),
                           reinterpret_cast<const std::byte*>(staged_scales.data()),
                           staged_scales.size() * sizeof(float));
          }
          memory.finish();
        });
}

void KvStore::write_from_device(SequenceId sequence, int layer, std::int64_t first, const KvView& k, const KvView& v,
                                void* stream) {
  check_device("write_from_device");
  device()->wait_for(stream);
  store(sequence, layer, first, k, v,
        [&](const KvView& source, std::int64_t token, std::int64_t count, DType type, std::byte* rows, float* scales) {
          device()->store_rows(source, token, count, type, rows, scales);
        });
  device()->hold_up(stream);
}

std::vector<TokenRange> KvStore::carried(SequenceId sequence, std::int64_t first, std::int64_t count) const {
  const Sequence& found = find(sequence);
  require(first >= 0 && count >= 0 && count <= found.length - first,
          "first = {}, count = {}; accepted: tokens of the sequence, 0 to {}", first, count, found.length);
  const std::int64_t chunk_tokens = config_.order.chunk_tokens;
  std::vector<TokenRange> ranges;
  for (std::int64_t token = first; token < first + count;) {
    const std::int64_t chunk = token / chunk_tokens;
    const std::int64_t end = std::min(first + count, (chunk + 1) * chunk_tokens);
    if (found.pages[static_cast<std::size_t>(chunk)] != kNoPage) append_range(ranges, sequence, token, end - token);
    token = end;
  }
  return ranges;
}

std::int64_t KvStore::carried_tokens(SequenceId sequence) const {
  std::int64_t tokens = 0;
  for (const TokenRange& range : carried(sequence, 0, length(sequence))) tokens += range.count;
  return tokens;
}

KvBatch KvStore::batch(int layer, std::span<const SequenceId> sequences) const {
  check_layer(layer);
  KvBatch batch;
  batch.device = device();
  std::int64_t longest = 0;
  for (const SequenceId id : sequences) {
    batch.lengths.push_back(length(id));
    longest = std::max(longest, batch.lengths.back());
  }
  const auto columns = static_cast<std::size_t>(chunk_count(longest));
  batch.table.resize(sequences.size() * columns, kNoPage);
  for (std::size_t b = 0; b < sequences.size(); ++b) {
    std::ranges::copy(find(sequences[b]).pages, batch.table.begin() + static_cast<std::ptrdiff_t>(b * columns));
  }
  const ChunkMemory base = pool_->memory(layer, 0);
  const auto view = [&](const std::byte* rows, const float* scales, DType type, std::int64_t dim) {
    KvView paged = KvView::paged(rows, type, pool_->pages(), config_.order.chunk_tokens, config_.kv_heads, dim,
                                 static_cast<std::int64_t>(sequences.size()), static_cast<std::int64_t>(columns),
                                 batch.table.data());
    paged.tokens = longest;
    return scales == nullptr ? paged : paged.with_scales(scales);
  };
  batch.k = view(base.k, base.k_scales, config_.k_type, config_.k_dim);
  batch.v = view(base.v, base.v_scales, config_.v_type, config_.v_dim);
  return batch;
}

ChunkMemory KvStore::chunk(int layer, SequenceId sequence, std::int64_t chunk) const {
  check_layer(layer);
  const Sequence& found = find(sequence);
  require(chunk >= 0 && chunk < chunk_count(found.length), "chunk = {}; accepted: 0 to {}", chunk,
          chunk_count(found.length) - 1);
  const std::int32_t page = found.pages[static_cast<std::size_t>(chunk)];
  require(page != kNoPage, "chunk = {} of sequence {}; accepted: one that rank {} carries", chunk, sequence,
          communicator_->rank());
  ChunkMemory memory = pool_->memory(layer, page);
  memory.tokens = chunk_use(found, chunk);
  return memory;
}

}  // namespace treeattn::parallel
