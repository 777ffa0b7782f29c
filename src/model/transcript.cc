// SPDX-License-Identifier: Apache-2.0
#include "model/transcript.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace treeattn::model {

void Transcript::append(std::span<const std::int32_t> tokens, Way way) {
  if (tokens.empty()) return;
  const bool goes_on = way == Way::kOneByOne && !segments_.empty() && segments_.back().way == way;
  if (!goes_on) segments_.push_back({length(), way});
  tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
}

void Transcript::truncate(std::int64_t length) {
  tokens_.resize(static_cast<std::size_t>(length));
  while (!segments_.empty() && segments_.back().first >= length) segments_.pop_back();
}

std::vector<Block> Transcript::blocks(std::int64_t first, std::int64_t count, std::int64_t chunk_tokens) const {
  std::vector<Block> out;
  const std::int64_t end = first + count;
  for (std::size_t s = 0; s < segments_.size(); ++s) {
    const std::int64_t segment_end = s + 1 < segments_.size() ? segments_[s + 1].first : length();
    const std::int64_t stop = std::min(end, segment_end);
    for (std::int64_t at = std::max(first, segments_[s].first); at < stop;) {
      const std::int64_t grid = segments_[s].way == Way::kOneByOne ? at + 1 : (at / chunk_tokens + 1) * chunk_tokens;
      const std::int64_t block_end = std::min(stop, grid);
      out.push_back({at, block_end - at, segments_[s].way});
      at = block_end;
    }
  }
  return out;
}

Transcript Transcript::restore(std::vector<std::int32_t> tokens, std::vector<Segment> segments) {
  Transcript out;
  out.tokens_ = std::move(tokens);
  out.segments_ = std::move(segments);
  base::require(out.segments_.empty() == out.tokens_.empty(), "{} segments for {} tokens", out.segments_.size(),
                out.tokens_.size());
  std::int64_t least = 0;
  for (const Segment& segment : out.segments_) {
    const bool first = &segment == out.segments_.data();
    base::require(first ? segment.first == 0 : segment.first >= least && segment.first < out.length(),
                  "a segment begins at token {}; accepted: {} to {}", segment.first, least, out.length() - 1);
    least = segment.first + 1;
  }
  return out;
}

}  // namespace treeattn::model
