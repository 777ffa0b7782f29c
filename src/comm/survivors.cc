// SPDX-License-Identifier: Apache-2.0
#include "comm/survivors.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

#include "base/sent.h"

namespace treeattn::comm {
namespace {

class Ballot {
 public:
  Ballot(Endpoint& endpoint, int context, int round, const std::vector<int>& members, RankSet lost)
      : endpoint_(endpoint), context_(context), round_(round), members_(members), lost_(std::move(lost)) {}

  const RankSet& lost() const { return lost_; }
  bool includes_self() const { return !contains(lost_, self()); }

  void tell_others() const {
    const Note note = note_of(Note::Kind::kShrink, endpoint_.next_context);
    for (const int rank : members_) {
      if (rank != self()) endpoint_.send(rank, note);
    }
  }

  // Takes over what has come; whether more are lost by it.
  bool listen() {
    gone_.clear();  // read before the notes: what they sent before has come by then
    for (const int rank : members_) {
      if (endpoint_.transport()->gone(rank)) unite(gone_, {rank});
    }
    if (!endpoint_.look(-1)) gone_.clear();  // not all that they said was read
    bool grown = false;
    for (Note& note : endpoint_.take_shrink_notes(context_, round_)) {
      const int sender = note.head.sender;
      if (contains(lost_, sender)) continue;  // given up: what it thinks no longer counts
      if (note.head.kind == Note::Kind::kAgreed) {
        base::require_sent(note.head.next_context >= endpoint_.next_context, sender,
                           "{} as the group that was agreed on; accepted: {} or more", note.head.next_context,
                           endpoint_.next_context);
        lost_ = std::move(note.lost);
        agreed_context_ = note.head.next_context;
        return false;
      }
      grown = unite(lost_, note.lost) || grown;
      latest_[sender] = std::move(note);
    }
    return grown;
  }

  bool add_lost(const RankSet& more) { return unite(lost_, more); }

  // The others who do not hold the same ranks for lost, as far as this one knows.
  RankSet open() const {
    RankSet out;
    for (const int rank : members_) {
      if (rank == self() || contains(lost_, rank)) continue;
      const auto note = latest_.find(rank);
      if (note == latest_.end() || note->second.lost != lost_) unite(out, {rank});
    }
    return out;
  }
  // Of those, who will say no more: gone, or, when time is up, silent so far.
  RankSet silent(bool time_is_up) const {
    RankSet out = open();
    std::erase_if(
        out, [&](int rank) { return !contains(gone_, rank) && !(time_is_up && latest_.find(rank) == latest_.end()); });
    return out;
  }

  bool agreed() const { return agreed_context_ || open().empty(); }
  Agreement agreement() const {
    Agreement out{.survivors = {}, .context = agreed_context_.value_or(endpoint_.next_context)};
    std::copy_if(members_.begin(), members_.end(), std::back_inserter(out.survivors),
                 [&](int rank) { return !contains(lost_, rank); });
    for (const int rank : out.survivors) {
      if (rank != self() && !agreed_context_) out.context = std::max(out.context, latest_.at(rank).head.next_context);
    }
    endpoint_.answer_with(note_of(Note::Kind::kAgreed, out.context));
    return out;
  }

 private:
  Note note_of(Note::Kind kind, int next_context) const {
    Note note;
    note.head = {.kind = kind, .context = context_, .sender = self(), .next_context = next_context, .round = round_};
    note.lost = lost_;
    return note;
  }
  int self() const { return endpoint_.transport()->rank(); }

  Endpoint& endpoint_;
  const int context_;
  const int round_;
  const std::vector<int>& members_;
  RankSet lost_;
  RankSet gone_;
  std::map<int, Note> latest_;         // from each of the others
  std::optional<int> agreed_context_;  // for the new group, as another had it who has agreed already
};

}  // namespace

std::optional<Agreement> agree_on_survivors(Endpoint& endpoint, Family& family, int context, int round,
                                            const std::vector<int>& members, std::chrono::duration<double> deadline) {
  const Instant start = endpoint.begin_call();
  Ballot ballot(endpoint, context, round, members, family.lost());
  bool news = true;
  for (int idle = 0; ballot.includes_self(); idle = news ? 0 : idle + 1) {
    if (news) ballot.tell_others();
    news = ballot.listen();
    const Instant now = endpoint.now();
    if (!ballot.agreed()) news = ballot.add_lost(ballot.silent(now >= after(start, kCallAt * deadline))) || news;
    if (!news && ballot.agreed() && ballot.includes_self()) {
      family.add_lost(ballot.lost());
      return ballot.agreement();
    }
    if (now >= after(start, deadline)) {
      ballot.add_lost(ballot.open());
      break;
    }
    if (!news) endpoint.transport()->pause(idle);
  }
  family.add_lost(ballot.lost());
  return std::nullopt;
}

}  // namespace treeattn::comm
