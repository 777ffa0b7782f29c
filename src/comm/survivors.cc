// SPDX-License-Identifier: Apache-2.0
#include "comm/survivors.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

namespace treeattn::comm {
namespace {

class Ballot {
 public:
  Ballot(Endpoint& endpoint, int context, int round, const std::vector<int>& members, RankSet lost)
      : endpoint_(endpoint), context_(context), round_(round), members_(members), lost_(std::move(lost)) {}

  const RankSet& lost() const { return lost_; }
  bool includes_self() const { return !contains(lost_, self()); }

  void tell_others() const {
    Note note;
    note.head = {.kind = Note::Kind::kShrink,
                 .context = context_,
                 .sender = self(),
                 .next_context = endpoint_.next_context,
                 .round = round_};
    note.lost = lost_;
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

  Agreement agreement() const {
    Agreement out{.survivors = {}, .context = endpoint_.next_context};
    std::copy_if(members_.begin(), members_.end(), std::back_inserter(out.survivors),
                 [&](int rank) { return !contains(lost_, rank); });
    for (const int rank : out.survivors) {
      if (rank != self()) out.context = std::max(out.context, latest_.at(rank).head.next_context);
    }
    return out;
  }

 private:
  int self() const { return endpoint_.transport()->rank(); }

  Endpoint& endpoint_;
  const int context_;
  const int round_;
  const std::vector<int>& members_;
  RankSet lost_;
  RankSet gone_;
  std::map<int, Note> latest_;  // from each of the others
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
    news = ballot.add_lost(ballot.silent(now >= after(start, kCallAt * deadline))) || news;
    if (!news && ballot.open().empty()) {
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
