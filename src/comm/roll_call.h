// SPDX-License-Identifier: Apache-2.0
// Who is still there: how the ranks find out, together, that some of them are lost.
//
// A *family* is a group made by a transport or by shrink(), with all groups split from it. It is broken as a whole: a
// rank lost in one group leaves others waiting in groups it is not in, for ranks that will not come because they have
// thrown. So the roll call is held by the whole family, whichever of its groups noticed.
//
//   quiet    -> a call has waited too long, or for a rank known to be gone, or a note of another rank has come
//   calling  -> every rank tells all others "here" and listens, until each has answered or is gone, or time is up
//   voting   -> every rank tells all others whom it misses and takes over what it hears, until those who are left all
//               miss the same ranks, or time is up
//   over     -> every call on every group of the family throws LostRanks, for ever
//
// A rank takes part whenever it is inside any call of any group, also of another family: notes belong to no tag, and
// Endpoint::look(), which every waiting loop calls, reads them and moves each roll call along. Nobody waits inside
// these classes. A rank that is not inside a call (it computes, is stopped, or dead) is silent and will be missed; if
// it comes back, it reads the votes, finds itself among the lost, and throws as well.
//
// When nobody is missing the call was too slow for its deadline. Then the ranks that others waited for, and that were
// not waiting themselves, are given up, because the callers have left the call anyway.
#pragma once

#include <chrono>
#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "comm/note.h"
#include "comm/transport.h"

namespace treeattn::comm {

using Clock = std::chrono::steady_clock;
using Instant = Clock::time_point;

bool contains(const RankSet& set, int rank);
// Adds `more` to `set`; whether that changed it.
bool unite(RankSet& set, const RankSet& more);
// "rank 2" or "ranks 2, 5"
std::string name_ranks(const RankSet& ranks);

class Endpoint;

class Family {
 public:
  Family(Endpoint& endpoint, int context, std::vector<int> members);

  int context() const { return context_; }
  const std::vector<int>& members() const { return members_; }
  bool quiet() const { return phase_ == Phase::kQuiet; }
  bool over() const { return phase_ == Phase::kOver; }
  // When over: who is lost, and whether they were only too slow.
  const RankSet& lost() const { return lost_; }
  bool slow() const { return slow_; }
  // A group that was split from it.
  void add_group(int context) { contexts_.push_back(context); }
  // shrink() may find that more are lost.
  void add_lost(const RankSet& more);

  // Starts a roll call, or, if there is one, makes it end no later than this.
  void call(Instant listen_until, Instant end);

  // For Endpoint::look(), in this order. Who is gone is read before the notes: what they sent before has come by then,
  // and been heard, if heard_all. Else they count as there: their last word may still come.
  void see_who_is_gone();
  void hear(const Note& note, Instant now);
  void advance(Instant now, bool heard_all);

 private:
  enum class Phase { kQuiet, kCalling, kVoting, kOver };
  struct Member {
    bool here = false;
    bool gone = false;
    bool voted = false;
    int waits_for = -1;
    RankSet vote;
  };

  RankSet missing() const;
  RankSet too_slow() const;
  void vote();
  void tell_others(Note::Kind kind);
  void finish();

  Endpoint& endpoint_;
  const int context_;
  const std::vector<int> members_;
  std::vector<int> contexts_;  // of all its groups
  Phase phase_ = Phase::kQuiet;
  std::map<int, Member> state_;  // by rank, once a roll call has begun
  RankSet lost_;
  bool slow_ = false;
  Instant listen_until_;
  Instant end_;
};

// What all groups of one rank share.
class Endpoint {
 public:
  explicit Endpoint(std::shared_ptr<Transport> transport) : transport_(std::move(transport)) {}

  const std::shared_ptr<Transport>& transport() const { return transport_; }

  // The time that deadlines count: while a call waits, that in which this rank runs. A process that is stopped, or
  // whose machine stands still, hears nobody meanwhile and must not take all others for lost. A loop that waits asks
  // every few milliseconds: of more than kLongestPause between two times that is counted.
  Instant begin_call();
  Instant now();

  // Reads the notes and moves the roll calls along. waits_for: the rank that this one waits for, or -1; it holds until
  // the next look. Whether it has read all notes that there were: it reads up to kNotesAtOnce, as a rank that sends
  // them without end must not keep this one from its deadline.
  bool look(int waits_for);
  static constexpr int kNotesAtOnce = 1024;
  int waits_for() const { return waits_for_; }
  void send(int to, const Note& note);

  // The members must include this rank. A family lives as long as a group holds it.
  std::shared_ptr<Family> make_family(int context, std::vector<int> members);
  // What has come from others that shrink the group of this context for the `round`th time: the last word of each, of
  // either kind.
  std::vector<Note> take_shrink_notes(int context, int round);
  // agreed: what this rank has agreed to. Who still has another opinion is told.
  void answer_with(const Note& agreed);

  // Of one rank, notes are kept on so many groups, rounds and kinds: far more than one sends that is ahead of this one.
  static constexpr std::size_t kMostKept = 256;

  // The lowest context that no group of this rank has had. Groups that share two ranks never share a context, so one
  // of its tags means one group.
  int next_context = 0;

  // By all families so far.
  RankSet lost;

 private:
  static constexpr std::chrono::milliseconds kLongestPause{100};
  // Notes for later, by sender. Of each it keeps the last on a group, a round and of a kind, which says all that those
  // before it said, and forgets the oldest group where there are too many: that harms none but a sender without end.
  using Subject = std::tuple<int, int, Note::Kind>;  // context, round
  using KeptNotes = std::map<int, std::map<Subject, Note>>;

  void hear(Note note, Instant now);
  void hear_who_shrinks(Note note);
  static void keep(KeptNotes& notes, Note note);

  std::shared_ptr<Transport> transport_;
  Instant asked_ = Clock::now();  // the time when it was last asked for
  Clock::duration stood_still_{};
  std::vector<std::weak_ptr<Family>> families_;
  KeptNotes early_;      // for families that the others have already and this rank is about to make
  KeptNotes shrinking_;  // of those who shrink a group
  std::map<std::pair<int, int>, Note> agreed_;  // by context and round: one for each group that shrink() has made
  int waits_for_ = -1;
};

// Share of a deadline after which a waiting call starts the roll call, and after which the roll call stops listening.
inline constexpr double kCallAt = 0.6;
inline constexpr double kListenUntil = 0.9;

inline Instant after(Instant start, std::chrono::duration<double> seconds) {
  return start + std::chrono::duration_cast<Clock::duration>(seconds);
}

}  // namespace treeattn::comm
