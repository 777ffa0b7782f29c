// SPDX-License-Identifier: Apache-2.0
// What is fetched is what will be read, in that order, whatever heads and rows there are. Nothing is read here: rows
// are places in memory that need not exist.
#include "kernels/cpu/rows_ahead.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include <gtest/gtest.h>

namespace treeattn::kernels {
namespace {

// 64 tokens whose blocks lie anywhere, with all heads of a token side by side.
std::vector<const std::byte*> blocks_anywhere(std::uintptr_t base, int block, int token_bytes, std::mt19937& random) {
  std::vector<std::uintptr_t> places;
  for (int t = 0; t < kTileTokens; t += block) {
    places.push_back(base + static_cast<std::uintptr_t>(t) * static_cast<std::uintptr_t>(token_bytes));
  }
  std::shuffle(places.begin(), places.end(), random);
  std::vector<const std::byte*> rows;
  for (int t = 0; t < kTileTokens; ++t) {
    rows.push_back(reinterpret_cast<const std::byte*>(places[static_cast<std::size_t>(t / block)]) +
                   t % block * token_bytes);
  }
  return rows;
}

void check_order(int block, int heads, int row_bytes, std::mt19937& random) {
  const int token_bytes = heads * row_bytes;
  const auto own = blocks_anywhere(std::uintptr_t{1} << 30, block, token_bytes, random);
  const auto next = blocks_anywhere(std::uintptr_t{1} << 34, block, token_bytes, random);
  RowsAhead ahead({own.data(), row_bytes}, kTileTokens, {next.data(), row_bytes, row_bytes}, heads, row_bytes, block);
  // What is read, a block's first row of one head after the other: this tile, then the next.
  std::vector<const std::byte*> read, fetched;
  for (const auto* rows : {&own, &next}) {
    for (int t = 0; t < kTileTokens; t += block) {
      for (int h = 0; h < heads; ++h) read.push_back((*rows)[static_cast<std::size_t>(t)] + h * row_bytes);
    }
  }
  for (int t = 0; t < kTileTokens; t += block) {
    ahead.begin(t);
    for (int h = 0; h < heads; ++h) {
      fetched.push_back(own[static_cast<std::size_t>(t)] + h * row_bytes + ahead.with_head(h));
    }
  }
  const auto lead = std::find(read.begin(), read.end(), fetched[0]) - read.begin();
  EXPECT_GE(lead, 1);
  EXPECT_LE((lead - 1) * block * row_bytes, RowsAhead::kBytes);
  EXPECT_TRUE(std::equal(fetched.begin(), fetched.end(), read.begin() + lead))
      << block << " tokens of " << heads << " heads of " << row_bytes << " bytes, " << lead << " ahead";
}

TEST(RowsAhead, FetchesWhatWillBeReadInThatOrder) {
  std::mt19937 random(5);
  for (const int block : {kTokenBlock, 16}) {
    for (const int heads : {1, 2, 3, 8, 16, 32}) {
      for (const int row_bytes : {16, 64, 80, 128, 256, 512, 1024}) check_order(block, heads, row_bytes, random);
    }
  }
}

TEST(RowsAhead, WithoutATileBehindFetchesWhatIsAtHand) {
  std::mt19937 random(6);
  const auto own = blocks_anywhere(std::uintptr_t{1} << 30, kTokenBlock, 8 * 256, random);
  RowsAhead ahead({own.data(), 256}, kTileTokens, {}, 8, 256);
  std::ptrdiff_t behind = -1;
  for (int t = 0; t < kTileTokens; t += kTokenBlock) {
    ahead.begin(t);
    for (int h = 0; h < 8; ++h) behind = ahead.with_head(h);
  }
  EXPECT_EQ(behind, 0);
}

}  // namespace
}  // namespace treeattn::kernels
