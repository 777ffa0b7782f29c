// SPDX-License-Identifier: Apache-2.0
#include "parallel/page_memory.h"

#include <algorithm>

namespace treeattn::parallel {

PageMemory::PageMemory(const KvCacheConfig& config, std::size_t pages, KvMemory* memory)
    : config_(config), pages_(pages) {
  page_bytes_ = token_bytes(config).parts();
  for (std::size_t i = 0; i < kParts; ++i) {
    page_bytes_[i] *= static_cast<std::size_t>(config.order.chunk_tokens);
    const std::size_t bytes = pages * page_bytes_[i];
    if (bytes == 0) continue;
    if (memory != nullptr) {
      workspaces_[i] = memory->workspace(i, bytes);
      parts_[i] = workspaces_[i]->data();
    } else {
      own_[i] = base::Buffer(bytes);
      parts_[i] = own_[i].as<std::byte>();
    }
  }
}

ChunkMemory PageMemory::page(std::size_t i, std::int64_t tokens) const {
  ChunkMemory out;
  out.k = parts_[0] + i * page_bytes_[0];
  out.v = parts_[1] + i * page_bytes_[1];
  if (parts_[2] != nullptr) out.k_scales = reinterpret_cast<float*>(parts_[2] + i * page_bytes_[2]);
  if (parts_[3] != nullptr) out.v_scales = reinterpret_cast<float*>(parts_[3] + i * page_bytes_[3]);
  out.tokens = tokens;
  return out;
}

// What holds no token is copied along.
PageMemory PageMemory::copied(KvMemory& gpu, std::size_t first, std::size_t count) const {
  PageMemory out(config_, count, &gpu);
  for (std::size_t i = 0; i < kParts; ++i) {
    if (out.parts_[i] == nullptr) continue;
    gpu.copy_in(out.parts_[i], parts_[i] + first * page_bytes_[i], count * page_bytes_[i]);
  }
  gpu.finish();
  return out;
}

void PageMemory::bind(KvBatch& batch) const {
  const auto sequences = static_cast<std::int64_t>(batch.lengths.size());
  const auto slots = static_cast<std::int64_t>(batch.table.size()) / sequences;
  const auto view = [&](std::size_t rows, std::size_t scales, DType type, std::int64_t dim) {
    KvView out = KvView::paged(parts_[rows], type, static_cast<std::int64_t>(pages_), config_.order.chunk_tokens,
                               config_.kv_heads, dim, sequences, slots, batch.table.data());
    out.tokens = *std::max_element(batch.lengths.begin(), batch.lengths.end());
    return parts_[scales] != nullptr ? out.with_scales(reinterpret_cast<const float*>(parts_[scales])) : out;
  };
  batch.k = view(0, 2, config_.k_type, config_.k_dim);
  batch.v = view(1, 3, config_.v_type, config_.v_dim);
}

}  // namespace treeattn::parallel
