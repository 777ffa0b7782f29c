// SPDX-License-Identifier: Apache-2.0
// The pages of one rank's part of a KV cache. A page is one chunk of one sequence: the same page number in every layer,
// for K, V and their scales. All pages of one layer's K lie in one array (and so for V and the scales), as the paged
// views of the kernels need it, and the array grows without moving.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "parallel/kv_memory.h"

namespace treeattn::parallel {

// Bytes of the rows of one token in one layer, all heads.
struct TokenBytes {
  static constexpr std::size_t kParts = 4;

  std::size_t k = 0;
  std::size_t v = 0;
  std::size_t k_scales = 0;
  std::size_t v_scales = 0;
  std::size_t all() const { return k + v + k_scales + v_scales; }
  std::array<std::size_t, kParts> parts() const { return {k, v, k_scales, v_scales}; }
};

// The rows of one chunk of one layer on this rank.
struct ChunkMemory {
  std::byte* k = nullptr;     // [tokens, kv_heads, k_dim], contiguous
  std::byte* v = nullptr;     // [tokens, kv_heads, v_dim], contiguous
  float* k_scales = nullptr;  // [tokens, kv_heads], null where the type has none
  float* v_scales = nullptr;
  std::int64_t tokens = 0;  // in use
};

// Pages with reference counts. The lowest free page is taken first, so that the arrays stay short.
class KvPool {
 public:
  // Reserves addresses for twice the memory there is, or less where there are not so many. Throws InvalidArgument for a
  // page that is larger than that, std::bad_alloc where there are none left for one.
  KvPool(int layers, const TokenBytes& token_bytes, std::int64_t page_tokens,
         std::shared_ptr<KvMemory> memory = host_memory());

  // A page with one reference and undefined content. Throws Error when the addresses are used up, std::bad_alloc.
  std::int32_t take();
  // Throws that Error unless there are addresses for so many more.
  void require_addresses(std::int64_t more) const;
  void share(std::int32_t page) { ++references_[static_cast<std::size_t>(page)]; }
  bool shared(std::int32_t page) const { return references_[static_cast<std::size_t>(page)] > 1; }
  void release(std::int32_t page) noexcept;
  // Gives the memory of the pages released since the last call back to the kernel.
  void trim() noexcept;

  // A new page with the first `tokens` tokens of another.
  std::int32_t copy(std::int32_t page, std::int64_t tokens);
  // The first `tokens` tokens of a page in one layer, as token_bytes().all() * tokens bytes: K, V, K's scales, V's.
  void pack(int layer, std::int32_t page, std::int64_t tokens, std::byte* out) const;
  void unpack(int layer, std::int32_t page, std::int64_t tokens, const std::byte* in);
  void fill_zero(std::int32_t page);

  // tokens is left 0. Page 0 is where the arrays begin. Addresses of the pool's memory, which may be a GPU's.
  ChunkMemory memory(int layer, std::int32_t page) const;
  std::int64_t pages() const { return static_cast<std::int64_t>(references_.size()); }  // the arrays hold
  std::int64_t used_pages() const { return used_; }
  std::size_t used_bytes() const { return static_cast<std::size_t>(used_) * page_bytes_; }
  const TokenBytes& token_bytes() const { return token_bytes_; }
  int layers() const { return layers_; }
  KvMemory& backend() const { return *memory_; }
  const std::shared_ptr<KvMemory>& shared_backend() const { return memory_; }

 private:
  static constexpr std::size_t kParts = TokenBytes::kParts;

  // Where the rows of a part begin.
  std::byte* rows(int layer, std::size_t part, std::int32_t page) const;
  std::size_t rows_bytes(std::size_t part, std::int64_t tokens) const;
  void reserve();
  void grow();
  void discard(std::int32_t first, std::int32_t last) noexcept;

  int layers_;
  TokenBytes token_bytes_;
  std::array<std::size_t, kParts> part_bytes_{};  // of one page
  std::int64_t page_tokens_;
  std::shared_ptr<KvMemory> memory_;
  std::size_t page_bytes_ = 0;                          // all layers and parts
  std::int64_t capacity_ = 0;                           // pages
  std::vector<std::unique_ptr<GrowingArray>> regions_;  // [layers, kParts]
  std::vector<std::int32_t> references_;                // [pages the arrays hold]
  std::vector<std::int32_t> free_;                      // a heap, lowest on top
  std::vector<std::int32_t> released_;                  // since the last trim; some may have been taken again
  std::int64_t used_ = 0;
};

}  // namespace treeattn::parallel
