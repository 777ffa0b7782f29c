// SPDX-License-Identifier: Apache-2.0
// What ranks tell each other when some of them are missing: see roll_call.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace treeattn::comm {

// Ascending numbers of ranks.
using RankSet = std::vector<int>;

// All ranks in it are the transport's numbers.
struct Note {
  enum class Kind : std::int32_t { kHere, kVote, kShrink, kAgreed };
  struct Head {
    Kind kind = Kind::kHere;
    std::int32_t context = 0;  // of the family; of the group for kShrink and kAgreed
    std::int32_t sender = 0;
    std::int32_t next_context = 0;  // kAgreed: of the new group
    std::int32_t waits_for = -1;
    std::int32_t slow = 0;   // kVote: the lost answered, but too late
    std::int32_t round = 0;  // kShrink, kAgreed: how many groups were made by shrinking this one before
    double listen_left = 0;
    double time_left = 0;  // seconds of the roll call
  };
  static_assert(sizeof(Head) == 48, "another layout is another TcpGreeting::kVersion");
  Head head;
  RankSet lost;  // kVote, kShrink, kAgreed
};

std::vector<std::byte> encode(const Note& note);
// Of any bytes at all, from rank `from` of `ranks`: what is no note of it throws Error, which names it. What comes back
// is in range: ranks that there are, contexts that may be, times that the clock can count.
Note parse_note(int from, int ranks, std::span<const std::byte> bytes);

}  // namespace treeattn::comm
