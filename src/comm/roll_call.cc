// SPDX-License-Identifier: Apache-2.0
#include "comm/roll_call.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>

#include "comm/group.h"

namespace treeattn::comm {
namespace {

double seconds_until(Instant end, Instant now) {
  return std::max(0.0, std::chrono::duration<double>(end - now).count());
}

}  // namespace

bool contains(const RankSet& set, int rank) { return std::binary_search(set.begin(), set.end(), rank); }

bool unite(RankSet& set, const RankSet& more) {
  RankSet both;
  std::set_union(set.begin(), set.end(), more.begin(), more.end(), std::back_inserter(both));
  const bool grown = both.size() > set.size();
  set = std::move(both);
  return grown;
}

std::string name_ranks(const RankSet& ranks) {
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
}

Family::Family(Endpoint& endpoint, int context, std::vector<int> members)
    : endpoint_(endpoint), context_(context), members_(std::move(members)), contexts_{context} {}

void Family::add_lost(const RankSet& more) {
  unite(lost_, more);
  unite(endpoint_.lost, more);
  if (!more.empty()) endpoint_.transport()->mark_lost(more);
}

void Family::call(Instant listen_until, Instant end) {
  if (phase_ != Phase::kQuiet) {
    listen_until_ = std::min(listen_until_, listen_until);
    end_ = std::min(end_, end);
    return;
  }
  phase_ = Phase::kCalling;
  listen_until_ = listen_until;
  end_ = end;
  for (const int member : members_) state_[member] = {};
  Member& me = state_[endpoint_.transport()->rank()];
  me.here = true;
  me.waits_for = endpoint_.waits_for();
  tell_others(Note::Kind::kHere);
  see_who_is_gone();
}

void Family::see_who_is_gone() {
  for (auto& [rank, member] : state_) member.gone = endpoint_.transport()->gone(rank);
}

void Family::hear(const Note& note, Instant now) {
  if (over() || std::find(members_.begin(), members_.end(), note.head.sender) == members_.end()) return;
  // The time left is measured from now: this rank may have been away while the note lay here. The others' votes, which
  // end the listening, make up for that.
  using Duration = std::chrono::duration<double>;
  call(after(now, Duration(note.head.listen_left)), after(now, Duration(note.head.time_left)));
  Member& sender = state_[note.head.sender];
  sender.here = true;
  if (note.head.kind == Note::Kind::kHere) {
    sender.waits_for = note.head.waits_for;
    return;
  }
  if (contains(lost_, note.head.sender)) return;  // given up: what it thinks no longer counts
  sender.voted = true;
  sender.vote = note.lost;
  const bool first = phase_ == Phase::kCalling;
  slow_ = (first || slow_) && note.head.slow != 0;
  if (unite(lost_, note.lost) || first) vote();
}

void Family::advance(Instant now, bool heard_all) {
  if (phase_ == Phase::kCalling) {
    const RankSet unheard = missing();
    const bool all_gone =
        std::all_of(unheard.begin(), unheard.end(), [&](int rank) { return heard_all && state_[rank].gone; });
    if (!all_gone && now < listen_until_) return;
    slow_ = unheard.empty();
    lost_ = slow_ ? too_slow() : unheard;
    vote();
  }
  if (phase_ != Phase::kVoting) return;
  if (contains(lost_, endpoint_.transport()->rank())) return finish();
  bool agreed = true;
  RankSet left;  // went away before it had heard everything
  for (const auto& [rank, member] : state_) {
    if (rank == endpoint_.transport()->rank() || contains(lost_, rank)) continue;
    if (member.voted && member.vote == lost_) continue;
    agreed = false;
    if (heard_all && member.gone) left.push_back(rank);
  }
  if (unite(lost_, left)) vote();
  if (agreed || now >= end_) finish();
}

RankSet Family::missing() const {
  RankSet out;
  for (const auto& [rank, member] : state_) {
    if (!member.here) out.push_back(rank);
  }
  return out;
}

RankSet Family::too_slow() const {
  RankSet waited_for, culprits;
  for (const auto& [rank, member] : state_) {
    if (member.waits_for >= 0) unite(waited_for, {member.waits_for});
  }
  for (const int rank : waited_for) {
    const auto member = state_.find(rank);
    if (member == state_.end() || member->second.waits_for < 0) culprits.push_back(rank);
  }
  return culprits.empty() ? waited_for : culprits;
}

void Family::vote() {
  phase_ = Phase::kVoting;
  tell_others(Note::Kind::kVote);
}

void Family::tell_others(Note::Kind kind) {
  const Instant now = endpoint_.now();
  const int self = endpoint_.transport()->rank();
  Note note;
  note.head = {.kind = kind,
               .context = context_,
               .sender = self,
               .next_context = endpoint_.next_context,
               .waits_for = endpoint_.waits_for(),
               .slow = slow_ ? 1 : 0,
               .listen_left = seconds_until(listen_until_, now),
               .time_left = seconds_until(end_, now)};
  if (kind == Note::Kind::kVote) note.lost = lost_;
  // Also to those given up: one that was only away learns of it.
  for (const int rank : members_) {
    if (rank != self) endpoint_.send(rank, note);
  }
}

void Family::finish() {
  phase_ = Phase::kOver;
  unite(endpoint_.lost, lost_);
  state_.clear();
  endpoint_.transport()->mark_lost(lost_);
  // What was under way when the rank was lost must not lie here as long as the others go on.
  for (const int context : contexts_) {
    endpoint_.transport()->forget(tag_of(context, Channel::kPointToPoint), kChannels);
  }
}

Instant Endpoint::begin_call() {
  asked_ = Clock::now();
  return asked_ - stood_still_;
}

Instant Endpoint::now() {
  const Clock::duration since = Clock::now() - asked_;
  if (since > kLongestPause) stood_still_ += since - kLongestPause;
  asked_ += since;
  return asked_ - stood_still_;
}

bool Endpoint::look(int waits_for) {
  waits_for_ = waits_for;
  // The order matters: see see_who_is_gone().
  bool calling = false;
  for (const auto& weak : families_) {
    const auto family = weak.lock();
    if (family == nullptr || family->quiet() || family->over()) continue;
    family->see_who_is_gone();
    calling = true;
  }
  int read = 0;
  for (; read < kNotesAtOnce; ++read) {
    const auto note = transport_->next_note();
    if (!note) break;
    hear(parse_note(note->from, transport_->size(), note->bytes), now());
  }
  calling = calling || read > 0;
  const bool heard_all = read < kNotesAtOnce;
  if (!calling) return heard_all;
  for (const auto& weak : families_) {
    if (const auto family = weak.lock()) family->advance(now(), heard_all);
  }
  return heard_all;
}

void Endpoint::hear(Note note, Instant now) {
  if (note.head.kind >= Note::Kind::kShrink) return hear_who_shrinks(std::move(note));
  for (const auto& weak : families_) {
    const auto family = weak.lock();
    if (family != nullptr && family->context() == note.head.context) return family->hear(note, now);
  }
  if (note.head.context >= next_context) keep(early_, std::move(note));
}

void Endpoint::hear_who_shrinks(Note note) {
  const auto agreed = agreed_.find({note.head.context, note.head.round});
  if (agreed == agreed_.end()) return keep(shrinking_, std::move(note));
  if (note.head.kind == Note::Kind::kShrink && note.lost != agreed->second.lost) send(note.head.sender, agreed->second);
}

void Endpoint::answer_with(const Note& agreed) {
  const std::pair key(agreed.head.context, agreed.head.round);
  agreed_[key] = agreed;
  for (Note& late : take_shrink_notes(key.first, key.second)) hear_who_shrinks(std::move(late));
}

void Endpoint::keep(KeptNotes& notes, Note note) {
  const Note::Head head = note.head;
  auto& of_sender = notes[head.sender];
  of_sender.insert_or_assign({head.context, head.round, head.kind}, std::move(note));
  if (of_sender.size() > kMostKept) of_sender.erase(of_sender.begin());
}

void Endpoint::send(int to, const Note& note) {
  if (!transport_->gone(to)) transport_->send_note(to, encode(note));
}

std::shared_ptr<Family> Endpoint::make_family(int context, std::vector<int> members) {
  auto family = std::make_shared<Family>(*this, context, std::move(members));
  std::erase_if(families_, [](const auto& weak) { return weak.expired(); });
  families_.push_back(family);
  next_context = std::max(next_context, context + 1);
  for (auto& [sender, notes] : std::exchange(early_, {})) {
    for (auto& [subject, note] : notes) hear(std::move(note), now());
  }
  return family;
}

std::vector<Note> Endpoint::take_shrink_notes(int context, int round) {
  std::vector<Note> out;
  for (auto& [sender, notes] : shrinking_) {
    for (const Note::Kind kind : {Note::Kind::kShrink, Note::Kind::kAgreed}) {
      if (auto found = notes.extract({context, round, kind})) out.push_back(std::move(found.mapped()));
    }
  }
  return out;
}

}  // namespace treeattn::comm
