// SPDX-License-Identifier: Apache-2.0
// A Llama goes on without lost ranks: what they carried is computed again from the tokens.
//
// Keys of layer n come from hidden states that attention of the layers below has made of all earlier tokens. So the
// lost tokens go through the layers in the order of their positions, and each layer's keys are written before it
// attends. Every survivor computes all of them, in the blocks they were first computed in: the bits are the same.
#include <algorithm>
#include <map>
#include <utility>

#include "base/sent.h"
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

// Of a sequence that may not be there any more.
std::int64_t length_of(const std::map<SequenceId, Transcript>& transcripts, SequenceId sequence) {
  const auto found = transcripts.find(sequence);
  return found == transcripts.end() ? 0 : found->second.length();
}

// What there is of the ranges, where the sequences are so long.
void cut_to(const std::map<SequenceId, Transcript>& transcripts, std::vector<TokenRange>& ranges) {
  for (TokenRange& range : ranges) {
    const std::int64_t length = length_of(transcripts, range.sequence);
    range.count = std::max<std::int64_t>(0, std::min(range.first + range.count, length) - range.first);
  }
}

// How a rank attends, as it tells the others.
struct SentAttention {
  std::int64_t changes = 0;
  std::int32_t strategy = 0;
  std::int32_t canonical = 0;
  std::int32_t link = 0;
  std::int32_t unused = 0;
};

SentAttention sent(const ParallelOptions& options, std::int64_t changes) {
  return {.changes = changes,
          .strategy = static_cast<std::int32_t>(options.strategy),
          .canonical = options.canonical ? 1 : 0,
          .link = static_cast<std::int32_t>(options.link)};
}

void check_sent(int rank, const SentAttention& how) {
  constexpr auto kLastStrategy = static_cast<std::int32_t>(Strategy::kAuto);
  constexpr auto kLastLink = static_cast<std::int32_t>(DeviceLink::kAuto);
  base::require_sent(how.changes >= 0, rank, "{} changes of attention; accepted: 0 or more", how.changes);
  base::require_sent(how.strategy >= 0 && how.strategy <= kLastStrategy, rank, "strategy {}; accepted: 0 to {}",
                     how.strategy, kLastStrategy);
  base::require_sent(how.canonical == 0 || how.canonical == 1, rank, "canonical = {}; accepted: 0 or 1", how.canonical);
  base::require_sent(how.link >= 0 && how.link <= kLastLink, rank, "link {}; accepted: 0 to {}", how.link, kLastLink);
}

ParallelOptions options_of(const SentAttention& how) {
  return {.strategy = static_cast<Strategy>(how.strategy),
          .canonical = how.canonical != 0,
          .link = static_cast<DeviceLink>(how.link)};
}

// Collective. The lists of all ranks, one after the other, each cut to the transcripts and united before.
std::vector<TokenRange> gathered_lists(Communicator& communicator, const std::map<SequenceId, Transcript>& transcripts,
                                       const std::vector<TokenRange>& mine) {
  std::uint64_t tokens = 0;
  for (const auto& [id, transcript] : transcripts) tokens += static_cast<std::uint64_t>(transcript.length());
  const std::vector<std::uint64_t> counts = parallel::gathered<std::uint64_t>(communicator, mine.size());
  for (std::size_t r = 0; r < counts.size(); ++r) {
    base::require_sent(counts[r] <= tokens, static_cast<int>(r), "{} missing pieces of {} tokens; accepted: up to {}",
                       counts[r], tokens, tokens);
  }
  const std::size_t longest = *std::max_element(counts.begin(), counts.end());
  if (longest == 0) return {};
  std::vector<TokenRange> padded = mine;
  padded.resize(longest);
  std::vector<TokenRange> all(longest * counts.size());
  communicator.allgather(std::as_bytes(std::span(padded)), std::as_writable_bytes(std::span(all)));
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i] == TokenRange()) continue;  // padding
    const std::int64_t length = length_of(transcripts, all[i].sequence);
    const bool there =
        all[i].first >= 0 && all[i].count > 0 && all[i].first < length && all[i].count <= length - all[i].first;
    base::require_sent(there, static_cast<int>(i / longest),
                       "{} tokens from {} of sequence {} as missing; accepted: within its {} tokens", all[i].count,
                       all[i].first, all[i].sequence, length);
  }
  return all;
}

}  // namespace

void Llama::recover(const TokenProgress& progress) {
  std::shared_ptr<Communicator> group = communicator();
  for (;;) {
    group = group->shrink();
    try {
      const std::vector<TokenRange> lost = cache_.adopt(group);
      missing_.insert(missing_.end(), lost.begin(), lost.end());
      agree_on_attention();
      agree_on_lengths();
      cut_to(transcripts_, missing_);
      missing_ = united(std::move(missing_));
      missing_ = united(gathered_lists(*group, transcripts_, missing_));
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

// As with the lengths: a rank may have been a change ahead, and what counts is what all have made. Ranks with as many
// changes and other options were not given the same: the next call that attends refuses that.
void Llama::agree_on_attention() {
  const std::vector<SentAttention> all =
      parallel::gathered(*communicator(), sent(options_.attention, attention_changes_));
  for (std::size_t r = 0; r < all.size(); ++r) check_sent(static_cast<int>(r), all[r]);
  const SentAttention& least = *std::ranges::min_element(all, {}, &SentAttention::changes);
  attend_by(attention_changes_ > least.changes ? options_of(least) : options_.attention);
  attention_changes_ = least.changes;
}

// A rank may have been a step ahead: what counts is what all have finished. Nothing is cut before all lengths are
// known: another rank may be lost on the way, and what was taken out of the transcripts by then would be gone.
void Llama::agree_on_lengths() {
  std::map<SequenceId, std::int64_t> lengths;
  for (const SequenceId id : cache_.sequences()) {
    std::int64_t& length = lengths[id];
    length = std::min(transcripts_[id].length(), cache_.length(id));
    const std::vector<std::int64_t> all = parallel::gathered(*communicator(), length);
    for (std::size_t r = 0; r < all.size(); ++r) {
      base::require_sent(all[r] >= 0, static_cast<int>(r), "{} as the length of sequence {}; accepted: 0 or more",
                         all[r], id);
      length = std::min(length, all[r]);
    }
  }
  std::erase_if(transcripts_, [&](const auto& entry) { return !lengths.contains(entry.first); });
  for (const auto& [id, length] : lengths) truncate(id, length);
}

void Llama::compute_missing(const TokenProgress& progress) {
  recovering_ = true;
  std::int64_t total = 0, done = 0;
  cut_to(transcripts_, missing_);
  for (const TokenRange& range : missing_) total += range.count;
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
