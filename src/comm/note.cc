// SPDX-License-Identifier: Apache-2.0
#include "comm/note.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "base/byte_reader.h"
#include "base/sent.h"
#include "comm/group.h"

namespace treeattn::comm {

using base::require_sent;

std::vector<std::byte> encode(const Note& note) {
  const auto head = std::as_bytes(std::span(&note.head, 1));
  const auto lost = std::as_bytes(std::span(note.lost));
  std::vector<std::byte> bytes(head.begin(), head.end());
  bytes.insert(bytes.end(), lost.begin(), lost.end());
  return bytes;
}

Note parse_note(int from, int ranks, std::span<const std::byte> bytes) {
  base::ByteReader in(bytes);
  Note note;
  const bool whole = in.take(note.head) && in.take(note.lost, in.left().size() / sizeof(int)) && in.left().empty();
  require_sent(whole, from, "a note of {} bytes; accepted: {} and {} more for each rank that it names", bytes.size(),
               sizeof(Note::Head), sizeof(int));
  const Note::Head& head = note.head;
  const auto kind = static_cast<std::int32_t>(head.kind);
  require_sent(kind >= 0 && kind <= static_cast<std::int32_t>(Note::Kind::kAgreed), from,
               "a note of kind {}; accepted: 0 to {}", kind, static_cast<std::int32_t>(Note::Kind::kAgreed));
  require_sent(head.sender == from, from, "a note in the name of rank {}; accepted: its own", head.sender);
  require_sent(head.context >= 0 && head.context <= kMaxContext, from, "a note on group {}; accepted: 0 to {}",
               head.context, kMaxContext);
  require_sent(may_be_next_context(head.next_context), from, "a note with {} as its next group; accepted: 0 to {}",
               head.next_context, kMaxContext + 1);
  require_sent(head.waits_for >= -1 && head.waits_for < ranks, from,
               "a note of waiting for rank {}; accepted: -1 to {}", head.waits_for, ranks - 1);
  require_sent(head.slow == 0 || head.slow == 1, from, "a note with slow = {}; accepted: 0 or 1", head.slow);
  require_sent(head.round >= 0, from, "a note on round {}; accepted: 0 or more", head.round);
  for (const double seconds : {head.listen_left, head.time_left}) {
    require_sent(seconds >= 0 && seconds <= kLongestDeadline.count(), from,
                 "a note with {} s left; accepted: 0 to {:.0e}", seconds, kLongestDeadline.count());
  }
  const bool ascending = std::ranges::adjacent_find(note.lost, std::greater_equal<>()) == note.lost.end();
  require_sent(ascending && (note.lost.empty() || (note.lost.front() >= 0 && note.lost.back() < ranks)), from,
               "a note of ranks that are none; accepted: numbers from 0 to {}, ascending", ranks - 1);
  require_sent(head.kind != Note::Kind::kHere || note.lost.empty(), from,
               "a note of being here that names {} lost ranks; accepted: none", note.lost.size());
  return note;
}

}  // namespace treeattn::comm
