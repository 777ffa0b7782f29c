// SPDX-License-Identifier: Apache-2.0
// The tokens of a sequence and how their keys were computed, so that a part can be computed again with the same bits.
//
// Bits of attention depend on which queries share a kernel call (docs/exactness.md). A prefill works in blocks on the
// grid of the chunks, decoding token by token. Whoever recomputes must form the same blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace treeattn::model {

enum class Way : std::uint8_t {
  kBlocks,    // prefill: what lies in one chunk together
  kOneByOne,  // decoding
};

// Queries at consecutive positions that go through attention in one kernel call.
struct Block {
  std::int64_t first = 0;
  std::int64_t count = 0;
  Way way = Way::kBlocks;  // a single token may have come in either

  bool operator==(const Block&) const = default;
};

class Transcript {
 public:
  // Tokens [first, the next segment's first) were added together in this way.
  struct Segment {
    std::int64_t first = 0;
    Way way = Way::kBlocks;

    bool operator==(const Segment&) const = default;
  };

  std::int64_t length() const { return static_cast<std::int64_t>(tokens_.size()); }
  std::span<const std::int32_t> tokens() const { return tokens_; }
  std::span<const std::int32_t> tokens(std::int64_t first, std::int64_t count) const {
    return tokens().subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count));
  }
  const std::vector<Segment>& segments() const { return segments_; }

  void append(std::span<const std::int32_t> tokens, Way way);
  void truncate(std::int64_t length);
  // The blocks that positions [first, first + count) were computed in. Requires that no block is cut by the range: so
  // it is where it begins and ends at the end of a chunk or of the text.
  std::vector<Block> blocks(std::int64_t first, std::int64_t count, std::int64_t chunk_tokens) const;

  // As a session's file has it. Throws InvalidArgument when the segments do not fit the tokens.
  static Transcript restore(std::vector<std::int32_t> tokens, std::vector<Segment> segments);
  bool operator==(const Transcript&) const = default;

 private:
  std::vector<std::int32_t> tokens_;
  std::vector<Segment> segments_;
};

}  // namespace treeattn::model
