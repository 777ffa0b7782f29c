// SPDX-License-Identifier: Apache-2.0
// A Llama goes on without lost ranks: what they carried is computed again from the tokens.
//
// Keys of layer n come from hidden states that attention of the layers below has made of all earlier tokens. So the
// lost tokens go through the layers in the order of their positions, and each layer's keys are written before it
// attends. Every survivor computes all of them, in the blocks they were first computed in: the bits are the same.
#include <algorithm>
#include <map>
#include <utility>

#include "model/llama.h"
#include "parallel/agree.h"
#include "treeattn/error.h"

namespace treeattn::model {
namespace {

// Ascending, without overlaps; neighbours stay apart.
std::vector<TokenRange> united(std::vector<TokenRange> ranges) {
  std::sort(ranges.begin(), ranges.end(), [](const TokenRange& a, const TokenRange& b) {
    return std::pair(a.sequence, a.first) < std::pair(b.sequence, b.first);
  });
  std::vector<TokenRange> out;
  for (const TokenRange& range : ranges) {
    const bool joins =
        !out.empty() && out.back().sequence == range.sequence && range.first < out.back().first + out.back().count;
    if (joins) {
      out.back().count = std::max(out.back().count, range.first + range.count - out.back().first);
    } else if (range.count > 0) {
      out.push_back(range);
    }
  }
  return out;
}

// Collective. The lists of all ranks, one after the other.
std::vector<TokenRange> gathered_lists(Communicator& communicator, const std::vector<TokenRange>& mine) {
  const std::vector<std::uint64_t> counts = parallel::gathered<std::uint64_t>(communicator, mine.size());
  const std::size_t longest = *std::max_element(counts.begin(), counts.end());
  if (longest == 0) return {};
  std::vector<TokenRange> padded = mine;
  padded.resize(longest);
  std::vector<TokenRange> all(longest * counts.size());
  communicator.allgather(std::as_bytes(std::span(padded)), std::as_writable_bytes(std::span(all)));
  return all;  // padding has no tokens
}

}  // namespace

void Llama::recover(const TokenProgress& progress) {
  std::shared_ptr<Communicator> group = communicator();
  for (;;) {
    group = group->shrink();
    try {
      const std::vector<TokenRange> lost = cache_.adopt(group);
      missing_.insert(missing_.end(), lost.begin(), lost.end());
      change_attention(options_.attention);
      agree_on_lengths();
      missing_ = united(gathered_lists(*group, missing_));
      compute_missing(progress);
      return;
    } catch (const LostRanks&) {
      // Another one. What is still missing is in missing_ of somebody, or is lost again.
    }
  }
}

void Llama::finish_recovery(const TokenProgress& progress) {
  if (recovering_) compute_missing(progress);
}

// A rank may have been a step ahead: what counts is what all have finished.
void Llama::agree_on_lengths() {
  std::map<SequenceId, Transcript> kept;
  for (const SequenceId id : cache_.sequences()) {
    Transcript& transcript = transcripts_[id];
    std::int64_t length = std::min(transcript.length(), cache_.length(id));
    parallel::combine_over_ranks(*communicator(), std::span(&length, 1),
                                 [](std::int64_t a, std::int64_t b) { return std::min(a, b); });
    transcript.truncate(length);
    cache_.truncate(id, length);
    kept[id] = std::move(transcript);
  }
  transcripts_ = std::move(kept);
}

void Llama::compute_missing(const TokenProgress& progress) {
  recovering_ = true;
  std::int64_t total = 0, done = 0;
  for (TokenRange& range : missing_) {
    const auto found = transcripts_.find(range.sequence);
    const std::int64_t length = found == transcripts_.end() ? 0 : found->second.length();
    range.count = std::max<std::int64_t>(0, std::min(range.first + range.count, length) - range.first);
    total += range.count;
  }
  const std::int64_t chunk = options_.order.chunk_tokens;
  const std::int64_t piece = options_.chunks_per_piece * chunk;
  while (!missing_.empty()) {
    TokenRange& range = missing_.front();
    const std::int64_t count = std::min(range.count, (range.first / chunk * chunk) + piece - range.first);
    if (count > 0) {
      const Transcript& transcript = transcripts_.at(range.sequence);
      compute_blocks(range.sequence, transcript.blocks(range.first, count, chunk),
                     transcript.tokens(range.first, count));
    }
    range.first += count;
    range.count -= count;
    done += count;
    if (range.count == 0) missing_.erase(missing_.begin());
    if (progress && total > 0) progress(done, total);
  }
  // The group goes on together, or recovers together.
  communicator()->barrier();
  recovering_ = false;
}

}  // namespace treeattn::model
