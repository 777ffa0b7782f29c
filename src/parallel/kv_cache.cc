// SPDX-License-Identifier: Apache-2.0
#include "treeattn/kv_cache.h"

#include <utility>

#include "base/check.h"
#include "parallel/kv_files.h"
#include "parallel/kv_store.h"

namespace treeattn {
namespace {

using base::require;

const Communicator& checked(const std::shared_ptr<Communicator>& communicator) {
  require(communicator != nullptr, "communicator = null; accepted: a group of ranks");
  return *communicator;
}

}  // namespace

KvCache::KvCache(std::shared_ptr<Communicator> communicator, const KvCacheConfig& config,
                 std::span<const double> weights, int gpu) {
  plan::Shares shares = parallel::make_shares(checked(communicator), config, weights);
  store_ = std::make_unique<parallel::KvStore>(std::move(communicator), config, std::move(shares), gpu);
}

KvCache::KvCache(std::unique_ptr<parallel::KvStore> store) : store_(std::move(store)) {}
KvCache::~KvCache() = default;
KvCache::KvCache(KvCache&&) noexcept = default;
KvCache& KvCache::operator=(KvCache&&) noexcept = default;

const KvCacheConfig& KvCache::config() const { return store_->config(); }
const std::shared_ptr<Communicator>& KvCache::communicator() const { return store_->communicator(); }
int KvCache::gpu() const { return store_->device() == nullptr ? kHost : store_->device()->gpu(); }

SequenceId KvCache::add_sequence() { return store_->add_sequence(); }
SequenceId KvCache::fork(SequenceId sequence) { return store_->fork(sequence); }
void KvCache::truncate(SequenceId sequence, std::int64_t length) { store_->truncate(sequence, length); }
void KvCache::drop(SequenceId sequence) { store_->drop(sequence); }
std::int64_t KvCache::length(SequenceId sequence) const { return store_->length(sequence); }
std::vector<SequenceId> KvCache::sequences() const { return store_->sequences(); }

void KvCache::append(SequenceId sequence, const KvView& k, const KvView& v) { store_->append(sequence, k, v); }
void KvCache::extend(SequenceId sequence, std::int64_t tokens) { store_->extend(sequence, tokens); }
void KvCache::write(SequenceId sequence, int layer, std::int64_t first, const KvView& k, const KvView& v) {
  store_->write(sequence, layer, first, k, v);
}

void KvCache::append_from_device(SequenceId sequence, const KvView& k, const KvView& v, void* stream) {
  store_->append_from_device(sequence, k, v, stream);
}
void KvCache::write_from_device(SequenceId sequence, int layer, std::int64_t first, const KvView& k, const KvView& v,
                                void* stream) {
  store_->write_from_device(sequence, layer, first, k, v, stream);
}

void KvCache::unshare(SequenceId sequence, std::int64_t first, std::int64_t count) {
  store_->unshare(sequence, first, count);
}

std::vector<TokenRange> KvCache::carried(SequenceId sequence, std::int64_t first, std::int64_t count) const {
  return store_->carried(sequence, first, count);
}
std::int64_t KvCache::carried_tokens(SequenceId sequence) const { return store_->carried_tokens(sequence); }
std::size_t KvCache::allocated_bytes() const { return store_->allocated_bytes(); }
std::span<const int> KvCache::rank_of_leaf() const { return store_->shares().rank_of_leaf(); }

void KvCache::rebalance(std::span<const double> weights) {
  store_->rebalance(parallel::make_shares(*store_->communicator(), store_->config(), weights));
}

std::vector<TokenRange> KvCache::adopt(std::shared_ptr<Communicator> survivors, std::span<const double> weights) {
  plan::Shares shares = parallel::make_shares(checked(survivors), store_->config(), weights);
  return store_->adopt(std::move(survivors), std::move(shares));
}

void KvCache::save(const std::filesystem::path& directory) const { parallel::save(*store_, directory); }

KvCache KvCache::load(std::shared_ptr<Communicator> communicator, const std::filesystem::path& directory,
                      std::span<const double> weights, int gpu) {
  checked(communicator);
  return KvCache(parallel::load(std::move(communicator), directory, weights, gpu));
}

}  // namespace treeattn
