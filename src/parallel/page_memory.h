// SPDX-License-Identifier: Apache-2.0
// Pages that are not in the cache: those of other ranks, on their way or collected. Views address them like the cache's
// own.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/buffer.h"
#include "parallel/kv_store.h"

namespace treeattn::parallel {

class PageMemory {
 public:
  // In the workspace of `memory`, so that there is one of these at a time, or, where that is null, in the host's memory
  // for as long as it lives. Content undefined.
  PageMemory(const KvCacheConfig& config, std::size_t pages, KvMemory* memory);

  ChunkMemory page(std::size_t i, std::int64_t tokens) const;
  // Pages [first, first + count) of the host's memory on a GPU.
  PageMemory copied(KvMemory& gpu, std::size_t first, std::size_t count) const;
  // Fills in the views of a batch whose table and lengths are set.
  void bind(KvBatch& batch) const;

 private:
  static constexpr std::size_t kParts = TokenBytes::kParts;
  static_assert(kParts <= KvMemory::kWorkspaces);  // one each

  KvCacheConfig config_;
  std::size_t pages_;
  std::array<std::size_t, kParts> page_bytes_;
  std::array<base::Buffer, kParts> own_;
  std::array<std::shared_ptr<GrowingArray>, kParts> workspaces_;
  std::array<std::byte*, kParts> parts_{};  // null where there are none
};

}  // namespace treeattn::parallel
