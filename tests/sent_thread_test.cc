// SPDX-License-Identifier: Apache-2.0
// What another rank sends may be short, or be no number that can be: the reader says who sent what, and what it would
// have taken.
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "address_limit.h"
#include "comm/group.h"
#include "comm/note.h"
#include "comm/roll_call.h"
#include "comm/tcp_card.h"
#include "comm/tcp_header.h"
#include "comm/tcp_socket.h"
#include "comm/transport.h"
#include "parallel/agree.h"
#include "parallel/kv_format.h"
#include "parallel/kv_store.h"
#include "tcp_knock.h"
#include "tcp_ranks.h"
#include "treeattn/communicator.h"
#include "treeattn/error.h"
#include "treeattn/kv_cache.h"

namespace treeattn {
namespace {

using Bytes = std::vector<std::byte>;

template <class T>
Bytes bytes_of(const T& value) {
  const auto bytes = std::as_bytes(std::span(&value, 1));
  return {bytes.begin(), bytes.end()};
}

// Somebody who has taken the place of rank 1 of 2, and says what it likes to rank 0.
class Impostor {
 public:
  explicit Impostor(int port) {
    const comm::Socket asking = testing::knock_at(port);
    comm::TcpCard card;
    card.rank = 1;
    card.size = 2;
    card.port = 1;
    say(asking, bytes_of(card));
    std::array<comm::TcpCard, 2> table;
    EXPECT_EQ(::recv(asking.fd(), table.data(), sizeof table, MSG_WAITALL), static_cast<ssize_t>(sizeof table));
    rank0_ = testing::knock_at(table[0].port);
    say(rank0_, bytes_of(card));
  }
  void say(const Bytes& bytes) const { say(rank0_, bytes); }
  // Until rank 0 has had enough.
  void say_without_end(const Bytes& bytes) const {
    while (::send(rank0_.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size())) {
    }
  }

 private:
  static void say(const comm::Socket& to, const Bytes& bytes) {
    EXPECT_EQ(::send(to.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  }

  comm::Socket rank0_;
};

// What rank 0 says to that, in a barrier.
std::string error_of_rank0(const std::function<void(const Impostor&)>& speech) {
  const int port = testing::free_port();
  std::string what = "no error";
  std::thread rank0([&] {
    try {
      std::shared_ptr<Communicator> world;
      {
        const testing_base::AddressLimit limit(std::size_t{256} << 20);  // as if there were little memory
        world = tcp_communicator(TcpPlace{0, 2, "127.0.0.1", port});
      }
      world->barrier();
    } catch (const Error& error) {
      what = error.what();
    } catch (const std::exception& error) {
      what = std::string("another error: ") + error.what();
    }
  });
  {
    const Impostor impostor(port);
    speech(impostor);
  }
  rank0.join();
  return what;
}
std::string error_of_rank0(const Bytes& bytes) {
  return error_of_rank0([&](const Impostor& impostor) { impostor.say(bytes); });
}

Bytes message(const comm::TcpHeader& header, const Bytes& content = {}) {
  Bytes all = bytes_of(header);
  all.insert(all.end(), content.begin(), content.end());
  return all;
}

Bytes note_of(const Bytes& content) { return message({comm::TcpHeader::kNote, 0, content.size()}, content); }

comm::Note sound_note() {
  comm::Note note;
  note.head.kind = comm::Note::Kind::kVote;
  note.head.sender = 1;
  note.head.listen_left = note.head.time_left = 1;
  note.lost = {1};
  return note;
}

Bytes note_with(const std::function<void(comm::Note&)>& change) {
  comm::Note note = sound_note();
  change(note);
  return comm::encode(note);
}

struct Lie {
  Bytes bytes;
  std::string answer;
};

TEST(Sent, MessagesOverTcpThatNobodySends) {
  const std::uint64_t far_too_long = std::uint64_t{1} << 62;
  const int barrier = comm::tag_of(0, comm::Channel::kCollective);
  const std::vector<Lie> lies = {
      {message({-2, 0, 0}), "rank 1 sent a message with tag -2; accepted: -1 to 32767"},
      {message({40000, 0, 0}), "rank 1 sent a message with tag 40000; accepted: "},
      {message({9, 2, 0}), "rank 1 sent a message of 0 bytes with given_up = 2; accepted: "},
      {message({9, 0, far_too_long}), "rank 1 sent a message of 4611686018427387904 bytes; accepted: up to "},
      {message({comm::TcpHeader::kNote, 0, far_too_long}), "rank 1 sent a note of 4611686018427387904 bytes; "},
      {message({barrier, 0, 8}, Bytes(8)), "receive of 0 bytes met a message of 8 bytes from transport rank 1; "},
      // Announced and not sent: room is made for what comes.
      {message({9, 0, std::uint64_t{1} << 47}, Bytes(8)), "rank 1 of 2 is gone"},
      {note_of(Bytes(12)), "rank 1 sent a note of 12 bytes; accepted: 48 and 4 more for each rank that it names"},
      {note_of({}), "rank 1 sent a note of 0 bytes; accepted: "},
  };
  for (const Lie& lie : lies) {
    const std::string what = error_of_rank0(lie.bytes);
    EXPECT_NE(what.find(lie.answer), std::string::npos) << what << "\nnot: " << lie.answer;
  }
}

// Messages of another tag than that of the barrier, one that has no end.
TEST(Sent, TcpHasAnEndForWhoeverSendsWithout) {
  const Bytes megabyte(std::size_t{1} << 20);
  const std::vector<std::pair<Bytes, Bytes>> floods = {
      {{}, message({9, 0, megabyte.size()}, megabyte)},
      {message({9, 0, std::uint64_t{1} << 47}), megabyte},
  };
  for (const auto& [first, then] : floods) {
    const std::string what = error_of_rank0([&](const Impostor& impostor) {
      impostor.say(first);
      impostor.say_without_end(then);
    });
    EXPECT_EQ(what.find("rank 1 sent "), 0u) << what;
    EXPECT_NE(what.find(" bytes that nobody has asked for; accepted: 268435456 of all ranks"), std::string::npos)
        << what;
  }
}

TEST(Sent, NotesThatNobodySends) {
  EXPECT_EQ(comm::parse_note(1, 3, comm::encode(sound_note())).lost, comm::RankSet{1});
  const std::vector<Lie> lies = {
      {Bytes(47), "a note of 47 bytes; accepted: 48 and 4 more"},
      {Bytes(50), "a note of 50 bytes; accepted: 48 and 4 more"},
      {note_with([](auto& note) { note.head.kind = static_cast<comm::Note::Kind>(4); }), "a note of kind 4; "},
      {note_with([](auto& note) { note.head.sender = 2; }), "a note in the name of rank 2; accepted: its own"},
      {note_with([](auto& note) { note.head.context = -1; }), "a note on group -1; "},
      {note_with([](auto& note) { note.head.next_context = 1 << 30; }), "a note with 1073741824 as its next group; "},
      {note_with([](auto& note) { note.head.waits_for = 3; }), "a note of waiting for rank 3; accepted: -1 to 2"},
      {note_with([](auto& note) { note.head.slow = 7; }), "a note with slow = 7; "},
      {note_with([](auto& note) { note.head.round = -1; }), "a note on round -1; "},
      {note_with([](auto& note) { note.head.time_left = std::nan(""); }), "a note with nan s left; accepted: 0 to "},
      {note_with([](auto& note) { note.head.listen_left = HUGE_VAL; }), "a note with inf s left; "},
      {note_with([](auto& note) { note.head.time_left = -1; }), "a note with -1 s left; "},
      {note_with([](auto& note) {
         note.lost = {0, 3};
       }),
       "a note of ranks that are none; accepted: numbers from 0 to 2"},
      {note_with([](auto& note) { note.lost = {-1}; }), "a note of ranks that are none; "},
      {note_with([](auto& note) {
         note.lost = {2, 1};
       }),
       "a note of ranks that are none; "},
      {note_with([](auto& note) { note.head.kind = comm::Note::Kind::kHere; }), "a note of being here that names 1 "},
  };
  for (const Lie& lie : lies) {
    try {
      comm::parse_note(1, 3, lie.bytes);
      ADD_FAILURE() << "taken: " << lie.answer;
    } catch (const Error& error) {
      EXPECT_EQ(std::string(error.what()).find("rank 1 sent " + lie.answer), 0u) << error.what();
    }
  }
}

// Rank 0, to which nothing comes but notes.
class NotesOnly final : public comm::Transport {
 public:
  using Next = std::function<std::optional<comm::ReceivedNote>()>;
  NotesOnly(int ranks, bool others_are_gone, Next next)
      : nodes_(static_cast<std::size_t>(ranks)), others_are_gone_(others_are_gone), next_(std::move(next)) {}

  std::string_view name() const override { return "notes"; }
  int rank() const override { return 0; }
  int size() const override { return static_cast<int>(nodes_.size()); }
  const std::vector<int>& nodes() const override { return nodes_; }
  std::shared_ptr<comm::Operation> send(int, int, std::span<const std::byte>, std::shared_ptr<const void>) override {
    return std::make_shared<comm::Operation>();
  }
  std::shared_ptr<comm::Operation> receive(int, int, std::span<std::byte>, std::shared_ptr<const void>) override {
    return std::make_shared<comm::Operation>();
  }
  bool test(comm::Operation&) override { return false; }
  void abandon(std::shared_ptr<comm::Operation>) override {}
  void forget(int, int) override {}
  void send_note(int, Bytes) override {}
  std::optional<comm::ReceivedNote> next_note() override {
    if (++read_at_once_ > 100000) throw std::runtime_error("notes are read without a look at the clock");
    return next_();
  }
  void pause(int) override { read_at_once_ = 0; }
  bool gone(int rank) const override { return others_are_gone_ && rank != 0; }
  void mark_lost(const std::vector<int>&) override {}

 private:
  const std::vector<int> nodes_;
  const bool others_are_gone_;
  const Next next_;
  int read_at_once_ = 0;
};

TEST(Sent, NotesWithoutEndDoNotHoldUpADeadline) {
  using Kind = comm::Note::Kind;
  for (const Kind kind : {Kind::kHere, Kind::kVote, Kind::kShrink, Kind::kAgreed}) {
    for (const int context : {0, 1}) {  // of the group, and of one that is not made yet
      const comm::ReceivedNote note{1, note_with([&](comm::Note& one) {
                                      one.head.kind = kind;
                                      one.head.context = context;
                                      one.lost.clear();
                                    })};
      Communicator world(std::make_shared<NotesOnly>(2, false, [&] { return note; }));
      world.set_deadline(Seconds(0.02));
      EXPECT_THROW(world.barrier(), LostRanks) << static_cast<int>(kind) << ", group " << context;
    }
  }
}

// Ranks 1 and 2 are gone. The last word of rank 1, that it misses rank 2, lies behind more than is read at once: only
// when that is read has it said all.
TEST(Sent, ManyNotesAreHeardToTheEnd) {
  const auto note = [](int context) {
    return note_with([&](comm::Note& one) {
      one.head.context = context;
      one.lost = {2};
    });
  };
  const Bytes others = note(9), last = note(0);
  int left = 6 * comm::Endpoint::kNotesAtOnce;
  Communicator world(std::make_shared<NotesOnly>(3, true, [&]() -> std::optional<comm::ReceivedNote> {
    if (left == 0) return {};
    return comm::ReceivedNote{1, --left == 0 ? last : others};
  }));
  try {
    world.barrier();
    ADD_FAILURE() << "nobody is missed";
  } catch (const LostRanks& error) {
    EXPECT_EQ(error.ranks(), std::vector<int>{2}) << error.what();
  }
}

// Of notes on groups and rounds that never come, an endpoint keeps some, and what others say all the same.
TEST(Sent, NotesForLaterHaveAnEnd) {
  using Kind = comm::Note::Kind;
  constexpr int kMost = comm::kMaxContext;
  std::vector<comm::ReceivedNote> notes;
  const auto add = [&](int from, Kind kind, int context, int round) {
    notes.push_back({from, note_with([&](comm::Note& one) {
                       one.head = {.kind = kind, .context = context, .sender = from, .round = round, .time_left = 1};
                       if (kind == Kind::kHere) one.lost.clear();
                     })});
  };
  add(2, Kind::kShrink, 0, 0);
  add(2, Kind::kHere, 1, 0);
  for (int i = 1; i <= kMost; ++i) {
    add(1, Kind::kShrink, 0, i);
    add(1, Kind::kShrink, 0, kMost);  // again and again
    add(1, Kind::kHere, i, 0);
  }
  std::size_t next = 0;
  const auto transport = std::make_shared<NotesOnly>(3, false, [&]() -> std::optional<comm::ReceivedNote> {
    return next < notes.size() ? std::optional(notes[next++]) : std::nullopt;
  });
  comm::Endpoint endpoint(transport);
  while (!endpoint.look(-1)) transport->pause(0);
  EXPECT_EQ(endpoint.take_shrink_notes(0, 0).size(), 1u);  // of rank 2
  std::size_t kept = 0;
  for (int round = 1; round <= kMost; ++round) kept += endpoint.take_shrink_notes(0, round).size();
  EXPECT_EQ(kept, comm::Endpoint::kMostKept);
  EXPECT_TRUE(endpoint.make_family(1, {0, 1})->quiet());  // one of the first groups, and all that rank 1 has said since
  EXPECT_FALSE(endpoint.make_family(kMost, {0, 1})->quiet());
}

// Rank 1 of 2 does as it likes in a call of rank 0's.
void expect_error(const std::string& answer, const std::function<void(Communicator&)>& call,
                  const std::function<void(Communicator&)>& liar) {
  run_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
    try {
      if (world->rank() == 1) return liar(*world);
      call(*world);
      ADD_FAILURE() << "taken: " << answer;
    } catch (const LostRanks&) {  // the liar, when rank 0 has had enough
      EXPECT_EQ(world->rank(), 1);
    } catch (const std::exception& error) {
      EXPECT_NE(std::string(error.what()).find(answer), std::string::npos) << error.what();
    }
  });
}

TEST(Sent, AnswersThatNobodyGives) {
  expect_error(
      "rank 1 sent 7 for whether it has failed; accepted: 0 or 1",
      [](Communicator& world) { parallel::first_failed(world, false); },
      [](Communicator& world) { parallel::gathered<std::uint8_t>(world, 7); });
  expect_error(
      "rank 1 sent a text of 1024 bytes without an end; ",
      [](Communicator& world) { parallel::failure_of_any(world, ""); },
      [](Communicator& world) {
        parallel::gathered<std::uint8_t>(world, 1);
        std::vector<char> text(1024, 'x');
        world.broadcast(std::as_writable_bytes(std::span(text)), 1);
      });
  // More than there is, and more than any memory holds.
  expect_error(
      "receive of 16777216 bytes met a message of ",
      [](Communicator& world) {
        Bytes bytes;
        parallel::share(world, bytes, 1);
      },
      [](Communicator& world) {
        std::uint64_t size = std::uint64_t{1} << 60;
        world.broadcast(std::as_writable_bytes(std::span(&size, 1)), 1);
        Bytes few(16);
        world.broadcast(few, 1);
      });
  struct Entry {
    int color, key, next_context;
  };
  expect_error(
      "rank 1 sent 1073741824 as its next group; accepted: 0 to ", [](Communicator& world) { world.split(0, 0); },
      [](Communicator& world) {
        parallel::gathered(world, Entry{0, 0, 1 << 30});
      });
}

TEST(Sent, LengthsThatNoSequenceHas) {
  const KvCacheConfig config{.kv_heads = 1, .k_dim = 64, .v_dim = 64};
  run_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
    KvCache cache(world, config);
    cache.add_sequence();
    try {
      if (world->rank() == 0) {
        cache.adopt(world);
        ADD_FAILURE() << "taken";
        return;
      }
      // As KvStore::adopt, up to the lengths.
      parallel::require_same(*world, parallel::digest(parallel::make_shares(*world, config, {})), "weights");
      parallel::gathered(*world, std::int64_t{1});
      Bytes sequences;
      parallel::share(*world, sequences, 0);
      std::array<std::int64_t, 2> length_and_rank = {-5, 1};
      parallel::combine_over_ranks(*world, std::span(&length_and_rank, 1),
                                   [](auto a, auto b) { return std::min(a, b); });
    } catch (const Error& error) {
      EXPECT_EQ(world->rank(), 0);
      EXPECT_EQ(std::string(error.what()),
                "rank 1 sent -5 as the length of a sequence; accepted: 0 or more, -1 where it has none");
    }
  });
}

TEST(Sent, WhatIsSharedComesWhole) {
  constexpr std::size_t kSize = (std::size_t{16} << 20) + 5;  // more than one piece
  run_ranks(3, [&](const std::shared_ptr<Communicator>& world) {
    Bytes bytes(world->rank() == 2 ? kSize : 7);
    if (world->rank() == 2) bytes.front() = bytes.back() = std::byte{9};
    parallel::share(*world, bytes, 2);
    ASSERT_EQ(bytes.size(), kSize);
    EXPECT_EQ(bytes.front(), std::byte{9});
    EXPECT_EQ(bytes.back(), std::byte{9});
    if (world->rank() == 2) bytes.clear();
    parallel::share(*world, bytes, 2);
    EXPECT_TRUE(bytes.empty());
  });
}

}  // namespace
}  // namespace treeattn
