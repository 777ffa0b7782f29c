// SPDX-License-Identifier: Apache-2.0
#include "parallel/kv_pool.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <new>
#include <utility>

#include "base/buffer.h"
#include "base/check.h"
#include "treeattn/error.h"

namespace treeattn::parallel {
namespace {

using base::require;

// Pages that become usable together, at least: a quarter more each time, so that the tables grow in few steps too.
constexpr std::int64_t kStepPages = 16;
constexpr std::size_t kStepBytes = base::Buffer::kHugePage;
// Smaller holes stay: each costs a system call and a page fault later.
constexpr std::size_t kSmallestHole = std::size_t{64} << 10;

#if defined(__SANITIZE_THREAD__)
constexpr std::size_t kMostAddresses = std::size_t{128} << 20;  // the thread sanitizer leaves a program few
#else
constexpr std::size_t kMostAddresses = std::numeric_limits<std::size_t>::max();
#endif

}  // namespace

KvPool::KvPool(int layers, const TokenBytes& token_bytes, std::int64_t page_tokens, std::shared_ptr<KvMemory> memory)
    : layers_(layers), token_bytes_(token_bytes), page_tokens_(page_tokens), memory_(std::move(memory)) {
  const std::size_t bytes = static_cast<std::size_t>(layers) * token_bytes.all();
  const std::size_t most = (std::numeric_limits<std::size_t>::max() >> 1) / bytes;
  require(static_cast<std::size_t>(page_tokens) <= most,
          "chunk_tokens = {} with {} bytes a token overflows; accepted: at most {}", page_tokens, bytes, most);
  const std::size_t tokens = static_cast<std::size_t>(page_tokens);
  part_bytes_ = token_bytes.parts();
  for (std::size_t& part : part_bytes_) part *= tokens;
  page_bytes_ = bytes * tokens;
  reserve();
}

void KvPool::reserve() {
  const std::size_t memory = memory_->bytes();
  const std::size_t most = 2 * std::max(memory, std::size_t{1} << 30);  // whatever is left of them just now
  require(page_bytes_ <= most, "chunk_tokens = {} makes a page of {} bytes; accepted: at most {}", page_tokens_,
          page_bytes_, most);
  // Many ranks in one process may leave less than we would like.
  for (std::size_t budget = std::min(2 * memory, kMostAddresses);; budget /= 2) {
    capacity_ = static_cast<std::int64_t>(
        std::min<std::size_t>(budget / page_bytes_, std::numeric_limits<std::int32_t>::max()));
    if (capacity_ == 0) throw std::bad_alloc();
    try {
      regions_.clear();
      for (int layer = 0; layer < layers_; ++layer) {
        for (const std::size_t bytes : part_bytes_) {
          regions_.push_back(memory_->reserve(bytes * static_cast<std::size_t>(capacity_)));
        }
      }
      return;
    } catch (const std::bad_alloc&) {
      if (budget <= std::min(memory, kMostAddresses) / 16) throw;
    }
  }
}

void KvPool::require_addresses(std::int64_t more) const {
  if (more <= capacity_ - used_) return;
  throw Error(
      fmt::format("{} more pages of {} bytes; accepted: {}, as addresses were reserved for {} and {} are in use", more,
                  page_bytes_, capacity_ - used_, capacity_, used_));
}

// Called when all pages are in use.
void KvPool::grow() {
  require_addresses(1);
  const std::int64_t held = pages();
  const std::size_t largest = std::max(part_bytes_[0], part_bytes_[1]);
  const std::int64_t step = std::max({kStepPages, static_cast<std::int64_t>(kStepBytes / largest), held / 4});
  const auto wanted = static_cast<std::size_t>(std::min(held + step, capacity_));
  free_.reserve(wanted);  // so that release() need not allocate
  released_.reserve(wanted);
  references_.reserve(wanted);
  for (std::size_t i = 0; i < regions_.size(); ++i) regions_[i]->grow(part_bytes_[i % kParts] * wanted);
  references_.resize(wanted, 0);
  for (auto page = static_cast<std::int32_t>(held); page < static_cast<std::int32_t>(wanted); ++page) {
    free_.push_back(page);
    std::push_heap(free_.begin(), free_.end(), std::greater<>());
  }
}

std::int32_t KvPool::take() {
  if (free_.empty()) grow();
  std::pop_heap(free_.begin(), free_.end(), std::greater<>());
  const std::int32_t page = free_.back();
  free_.pop_back();
  references_[static_cast<std::size_t>(page)] = 1;
  ++used_;
  return page;
}

void KvPool::release(std::int32_t page) noexcept {
  if (--references_[static_cast<std::size_t>(page)] > 0) return;
  free_.push_back(page);
  std::push_heap(free_.begin(), free_.end(), std::greater<>());
  // Full only when pages were taken and released again and again: then the memory is about to be used anyway.
  if (released_.size() < released_.capacity()) released_.push_back(page);
  --used_;
}

void KvPool::trim() noexcept {
  std::erase_if(released_, [&](std::int32_t page) { return references_[static_cast<std::size_t>(page)] > 0; });
  std::sort(released_.begin(), released_.end());
  for (std::size_t i = 0; i < released_.size();) {
    std::size_t end = i + 1;
    while (end < released_.size() && released_[end] <= released_[end - 1] + 1) ++end;
    discard(released_[i], released_[end - 1] + 1);
    i = end;
  }
  released_.clear();
}

// Pages [first, last) are free. Where pages are small, their free neighbours help to fill whole pages of the kernel.
void KvPool::discard(std::int32_t first, std::int32_t last) noexcept {
  const auto is_free = [&](std::int32_t page) { return references_[static_cast<std::size_t>(page)] == 0; };
  for (std::size_t part = 0; part < kParts; ++part) {
    const std::size_t bytes = part_bytes_[part];
    if (bytes == 0) continue;
    const auto reach = static_cast<std::int32_t>(kSmallestHole / bytes);
    const std::int32_t lowest = std::max(0, first - reach);
    const std::int32_t highest = static_cast<std::int32_t>(std::min<std::int64_t>(pages(), std::int64_t{last} + reach));
    std::int32_t begin = first, end = last;
    while (begin > lowest && is_free(begin - 1)) --begin;
    while (end < highest && is_free(end)) ++end;
    const std::size_t hole = bytes * static_cast<std::size_t>(end - begin);
    if (hole < kSmallestHole) continue;
    for (std::size_t i = part; i < regions_.size(); i += kParts) {
      regions_[i]->discard(bytes * static_cast<std::size_t>(begin), hole);
    }
  }
}

std::byte* KvPool::rows(int layer, std::size_t part, std::int32_t page) const {
  std::byte* base = regions_[static_cast<std::size_t>(layer) * kParts + part]->data();
  return base == nullptr ? nullptr : base + part_bytes_[part] * static_cast<std::size_t>(page);
}

std::size_t KvPool::rows_bytes(std::size_t part, std::int64_t tokens) const {
  return part_bytes_[part] / static_cast<std::size_t>(page_tokens_) * static_cast<std::size_t>(tokens);
}

ChunkMemory KvPool::memory(int layer, std::int32_t page) const {
  ChunkMemory memory;
  memory.k = rows(layer, 0, page);
  memory.v = rows(layer, 1, page);
  memory.k_scales = reinterpret_cast<float*>(rows(layer, 2, page));
  memory.v_scales = reinterpret_cast<float*>(rows(layer, 3, page));
  return memory;
}

std::int32_t KvPool::copy(std::int32_t page, std::int64_t tokens) {
  const std::int32_t fresh = take();
  for (int layer = 0; layer < layers_; ++layer) {
    for (std::size_t part = 0; part < kParts; ++part) {
      if (part_bytes_[part] == 0) continue;
      memory_->copy(rows(layer, part, fresh), rows(layer, part, page), rows_bytes(part, tokens));
    }
  }
  return fresh;
}

void KvPool::pack(int layer, std::int32_t page, std::int64_t tokens, std::byte* out) const {
  for (std::size_t part = 0; part < kParts; ++part) {
    if (part_bytes_[part] == 0) continue;
    memory_->copy_out(out, rows(layer, part, page), rows_bytes(part, tokens));
    out += rows_bytes(part, tokens);
  }
  memory_->finish();
}

void KvPool::unpack(int layer, std::int32_t page, std::int64_t tokens, const std::byte* in) {
  for (std::size_t part = 0; part < kParts; ++part) {
    if (part_bytes_[part] == 0) continue;
    memory_->copy_in(rows(layer, part, page), in, rows_bytes(part, tokens));
    in += rows_bytes(part, tokens);
  }
  memory_->finish();
}

void KvPool::fill_zero(std::int32_t page) {
  for (int layer = 0; layer < layers_; ++layer) {
    for (std::size_t part = 0; part < kParts; ++part) {
      if (part_bytes_[part] != 0) memory_->fill_zero(rows(layer, part, page), part_bytes_[part]);
    }
  }
}

}  // namespace treeattn::parallel
