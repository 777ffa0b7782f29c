// SPDX-License-Identifier: Apache-2.0
// A cache leaf by leaf, as it is moved and as it lies in files.
#include <fmt/format.h>

#include <algorithm>
#include <unordered_map>

#include "parallel/kv_store.h"
#include "plan/tree_order.h"
#include "treeattn/error.h"

namespace treeattn::parallel {

std::vector<std::int64_t> tokens_of_pages(std::span<const LeafChunk> chunks) {
  std::vector<std::int64_t> tokens;
  std::vector<std::int64_t> chunk_of_page;
  for (const LeafChunk& chunk : chunks) {
    const auto page = static_cast<std::size_t>(chunk.page);
    if (chunk.page < 0 || page > tokens.size() || (page < tokens.size() && chunk_of_page[page] != chunk.chunk)) {
      throw Error(
          fmt::format("chunk {} of sequence {} has page {}; accepted: a page of the same chunk, or the next, {}",
                      chunk.chunk, chunk.sequence, chunk.page, tokens.size()));
    }
    if (page == tokens.size()) {
      tokens.push_back(0);
      chunk_of_page.push_back(chunk.chunk);
    }
    tokens[page] = std::max(tokens[page], chunk.tokens);
  }
  return tokens;
}

std::vector<LeafChunk> KvStore::leaf_chunks(int leaf) const {
  std::vector<LeafChunk> chunks;
  std::unordered_map<std::int32_t, std::int32_t> number_of_page;
  for (const auto& [id, sequence] : sequences_) {
    const std::int64_t end = chunk_count(sequence.length);
    for (std::int64_t c = plan::first_chunk(config_.order, leaf, 0); c < end;
         c = plan::next_chunk(config_.order, leaf, c)) {
      const std::int32_t page = sequence.pages[static_cast<std::size_t>(c)];
      std::int32_t number = kNoPage;
      if (page != kNoPage) {
        number = number_of_page.try_emplace(page, static_cast<std::int32_t>(number_of_page.size())).first->second;
      }
      chunks.push_back({id, c, chunk_use(sequence, c), number});
    }
  }
  return chunks;
}

std::vector<std::int32_t> KvStore::pool_pages(std::span<const LeafChunk> chunks) const {
  std::vector<std::int32_t> pages;
  for (const LeafChunk& chunk : chunks) {
    if (chunk.page == static_cast<std::int32_t>(pages.size())) {
      pages.push_back(find(chunk.sequence).pages[static_cast<std::size_t>(chunk.chunk)]);
    }
  }
  return pages;
}

bool KvStore::holds(int leaf) const {
  return std::ranges::all_of(leaf_chunks(leaf), [](const LeafChunk& chunk) { return chunk.page != kNoPage; });
}

void KvStore::place(std::span<const LeafChunk> chunks, std::span<const std::int32_t> pages) {
  std::size_t used = 0;
  for (const LeafChunk& chunk : chunks) {
    const auto number = static_cast<std::size_t>(chunk.page);
    find(chunk.sequence).pages[static_cast<std::size_t>(chunk.chunk)] = pages[number];
    if (number < used) {
      pool_->share(pages[number]);
    } else {
      ++used;
    }
  }
}

void KvStore::release_leaf(int leaf) {
  for (const LeafChunk& chunk : leaf_chunks(leaf)) {
    std::int32_t& page = find(chunk.sequence).pages[static_cast<std::size_t>(chunk.chunk)];
    if (page != kNoPage) pool_->release(page);
    page = kNoPage;
  }
  pool_->trim();
}

void KvStore::restore(SequenceId sequence, std::int64_t length) {
  Sequence& added = sequences_.try_emplace(sequence).first->second;
  added.pages.assign(static_cast<std::size_t>(chunk_count(length)), kNoPage);
  added.length = length;
}

}  // namespace treeattn::parallel
